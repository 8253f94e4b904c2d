"""`train --measure`: nothing is kept, and what a few steps of full length take is printed."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import launching
import pytest

from grpo_math.checks.setup import Setup
from grpo_math.planner import choose
from grpo_math.planner.remedies import faster
from grpo_math.problems.from_recipe import EvaluationPlan, HeldOutSet
from grpo_math.rewards.functions import no_reward
from grpo_math.settings.recipe import read
from grpo_math.settings.run_settings import RunSettings
from grpo_math.train import measure
from grpo_math.trainer.step_cost import GENERATION, SCORING, UPDATE, Cost

ROWS = [{"problem": "1 + 1?", "answer": "2"}] * 10


def settings(**changes):
    """Return settings as TRL has completed them: rollouts of 32 completions, which serve two steps of 16."""
    return SimpleNamespace(**{
        "per_device_train_batch_size": 4, "num_generations": 4, "gradient_accumulation_steps": 4, "world_size": 1,
        "generation_batch_size": 32, "num_iterations": 1, "max_completion_length": 256, "generation_kwargs": None,
        "num_train_epochs": 2.0, "max_steps": 50, "use_cpu": False, "use_vllm": False,
    } | changes)  # fmt: skip


def setup(*words: str, evaluation: EvaluationPlan | None = None) -> Setup:
    made = Setup(read(["--model_name_or_path", "embedded", "--use_cpu", *words]).raise_first_problem())
    vars(made)["problems"] = SimpleNamespace(evaluation=evaluation)
    return made


def test_a_measurement_keeps_nothing_and_says_what_a_run_takes(train, tmp_path):
    code, lines = train("--use_peft", "--eval_n=4", "--measure", "--beta=0.04")
    assert (code, (tmp_path / "run").exists()) == (0, False)
    printed = [line.removeprefix("measure  ") for line in lines if line.startswith("measure ")]
    times, hours, generation, training, *_, last = printed
    assert times.startswith("a rollout takes ")
    assert " s (4 completions of 8 tokens), an update " in times
    assert hours.startswith("at most ")
    assert hours.endswith(" s: 4 steps and 8 completions of evaluations, all of full length")
    assert [line.partition(": ")[0] for line in (generation, training)] == ["generation", "training"]
    assert last == f"nothing was written to {tmp_path / 'run'}"


@pytest.mark.full
def test_two_processes_answer_with_one_object_on_stdout(small, tmp_path):
    Path(tmp_path / "two.yaml").write_text("distributed_type: MULTI_GPU\nuse_cpu: true\nnum_processes: 2\n")
    command = [sys.executable, "-m", "grpo_math.cli", "train", "--accelerate_config", str(tmp_path / "two.yaml")]
    words = ["--model_name_or_path", small, *launching.TINY, "--output_dir", str(tmp_path / "run")]
    more = ["--max_steps=4", "--rewards=accuracy", "--report_to=none", "--measure", "--json"]
    answer = json.loads(launching.run([*command, *words, *more]))
    assert (answer["completions"], answer["tokens"], answer["steps"]) == (8, 8, 4)
    assert 0 < answer["seconds"]["update"] < answer["seconds"]["step"]
    assert min(peak["measured_gb"] for peak in answer["memory"].values()) > 0
    assert not (tmp_path / "run").exists()


def test_json_without_a_measurement_is_refused(small, capfd):
    from grpo_math.cli import main

    assert main(["train", "demo_cpu", "--json"]) == 2
    assert capfd.readouterr().err == "error: --json would be ignored without --measure: leave it out\n"


def test_two_rollouts_of_full_length_are_trained_on():
    config = settings(num_iterations=2, generation_kwargs={"top_k": 5})
    whole, rewards = measure.shorten(config, [len], problems=100)
    assert (whole.steps, whole.cycle, whole.tokens, whole.length) == (50, 4, 256, 256)
    assert (config.max_steps, config.generation_kwargs) == (8, {"top_k": 5, "min_new_tokens": 256})
    # The rewards of the recipe take their time, and the last one decides.
    assert (rewards, config.reward_weights) == ([len, measure.alternating], [0.0, 1.0])
    assert measure.alternating(["a", "b", "c"]) == [0.0, 1.0, 0.0]


def test_epochs_are_steps_and_a_cpu_gets_short_completions_and_distillation_no_rewards():
    config = settings(max_steps=-1, use_cpu=True, use_vllm=True)
    whole, rewards = measure.shorten(config, [no_reward], problems=100)
    assert (whole.steps, whole.tokens, whole.length) == (50, measure.SHORT, 256)  # 2 x 100 x 4 / 16
    assert config.generation_kwargs == {"min_tokens": measure.SHORT}
    assert config.max_steps == whole.cycle, "one rollout"
    assert (rewards, hasattr(config, "reward_weights")) == ([no_reward], False)


def cost(seconds=0.0, peak=0, reserved=0):
    return Cost(seconds, 0.0, 0, peak, reserved)


def test_the_hours_are_those_of_the_slowest_process_in_the_last_cycle_and_of_the_evaluations():
    evaluation = EvaluationPlan(HeldOutSet("mine", "test", ROWS), [HeldOutSet("mine", "test", ROWS[:5], 4, 0.5)], None)
    whole = measure.shorten(settings(max_steps=20, use_cpu=True), [len], problems=100)[0]
    first = [{GENERATION: cost(100), SCORING: cost(100), UPDATE: cost(100)}, {UPDATE: cost(100)}]
    fast, slow = (
        [*first, {GENERATION: cost(n * 16), SCORING: cost(n * 2), UPDATE: cost(n)}, {UPDATE: cost(n)}] for n in (1, 2)
    )
    answer = measure.times([fast, slow], setup("--heldout_every", "10", evaluation=evaluation), whole)
    assert answer["seconds"] == {"rollout": 36.0, "update": 2.0, "step": 20.0}
    # Twice 10 problems, and twice 5 with 4 samples each; 32 completions took 32 seconds. 32 of 256 tokens.
    assert answer["evaluated"] == 2 * 10 + 2 * 5 * 4
    assert answer["hours"] == pytest.approx((20 * 20 + 60) / 3600 * 256 / 32)


def test_the_peaks_are_of_all_processes_on_a_cpu_and_of_the_fullest_gpu(monkeypatch):
    monkeypatch.setattr(measure, "_planned", lambda *_: None)
    whole = measure.shorten(settings(), [len], problems=100)[0]
    ranks = [
        [
            {
                GENERATION: cost(peak=n << 30, reserved=n << 31),
                SCORING: cost(),
                UPDATE: cost(peak=3 << 30, reserved=5 << 30),
            }
        ]
        for n in (1, 2)
    ]
    on_cpu, on_gpu = (measure.memory(ranks, setup(), whole, on_gpu=on_gpu)["memory"] for on_gpu in (False, True))
    assert [peak["measured_gb"] for peak in on_cpu.values()] == [3.0, 6.0]
    assert [peak["measured_gb"] for peak in on_gpu.values()] == [4.0, 5.0]
    assert measure.memory(ranks, setup(), whole, on_gpu=True)["faster"] is None


LORA = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("gb", "factor", "fields", "change"),
    [
        (24, 1.0, {}, {"gradient_checkpointing": False}),
        (24, 1.0, {"gradient_checkpointing": False}, None),  # a pass is a step already
        (8, 1.0, {"gradient_accumulation_steps": 4}, {"max_tokens_per_micro_batch": 32768}),
        (8, 2.0, {"gradient_accumulation_steps": 4}, None),  # it takes more than was planned
    ],
)
def test_memory_that_is_left_has_a_use(gb, factor, fields, change):
    recipe = RunSettings({"model_name_or_path": "Qwen/Qwen2.5-1.5B", **LORA, **fields})
    plan = choose(recipe, {"": None}, gpus=1, gpu_gb=gb, cpu_gb=64, offline=True)[1]
    assert plan.fits
    assert faster(plan, factor) == change
