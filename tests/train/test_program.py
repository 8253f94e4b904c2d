"""The training program: what a run prints and leaves, its best checkpoint, and what is refused."""

import json
import os
import re
from types import SimpleNamespace
from unittest.mock import Mock

import launching
import pytest
import torch
import yaml
from safetensors.torch import load_file
from small_runs import history, promised
from small_trainers import RUN

from grpo_math.checks.preflight import CHECKS, EARLY
from grpo_math.errors import UserError
from grpo_math.evaluation import evaluator
from grpo_math.evaluation.paired import SAME
from grpo_math.grading import Verdict, grade_batch
from grpo_math.problems.from_recipe import EvaluationPlan, HeldOutSet
from grpo_math.run import checkpoints, metrics
from grpo_math.settings.accelerate import deepspeed_config
from grpo_math.settings.recipe import read
from grpo_math.settings.run_settings import RunSettings
from grpo_math.train import program
from grpo_math.train.program import TrainingRun, _lay_out_memory

PRODUCTS = "eval_generated_products_accuracy"
BEST = ["--keep_best", "--eval_split=heldout", "--save_steps=2", "--save_total_limit=1", "--heldout_every=1"]
# A random model is never right, so no later checkpoint than the first is better.
LORA = [*BEST, "--max_steps=3", "--use_peft", "--eval_n=4", "--heldout", '{"data": "generated:products", "n": 2}']


ONE = HeldOutSet("generated", "test", [{"problem": "1 + 1?"}])


def started(folder, evaluation=None, **config):
    """A run whose model is not loaded."""
    settings = {"deepspeed_plugin": None, "fsdp": "", "world_size": 2, "push_to_hub": False, "hub_token": None} | config
    others = {"run": SimpleNamespace(keeps_best=True), "model": SimpleNamespace(use_peft=True)}
    run = TrainingRun(
        SimpleNamespace(config=SimpleNamespace(**settings), recipe=read(["--eval_n=0"]), **others), folder
    )
    vars(run.setup)["problems"] = SimpleNamespace(evaluation=evaluation)
    return run


def test_a_gpu_that_torch_cannot_use_ends_training_also_after_the_early_checks(monkeypatch, capsys):
    """torch itself finds more than the check without torch, for example a driver that has not started."""
    monkeypatch.setattr("grpo_math.system.gpus.unusable", lambda: ("CUDA error 802", "restart it"))
    monkeypatch.setattr(program, "build", Mock(side_effect=AssertionError("not reached")))
    assert program.main(["--model_name_or_path", "nowhere"], warned=[]) == 2
    assert capsys.readouterr().err == (
        "error: use_cpu=False needs a GPU that torch can use: CUDA error 802: restart it, or set use_cpu: true\n"
    )


def test_checks_that_grpo_math_train_has_made_are_not_made_again(small, tmp_path, monkeypatch, capfd):
    made = []
    monkeypatch.setattr(
        program, "agree_warning_lines", lambda setup, checks: made.append([check.name for check in checks]) or []
    )
    monkeypatch.setattr(program, "build_trainer", Mock(side_effect=UserError("as planned: stop here")))
    words = ["--model_name_or_path", small, "--output_dir", str(tmp_path / "run"), *RUN, "--rewards=accuracy"]
    assert [program.main(words, warned=lines) for lines in (None, ["warning: an early one"])] == [2, 2]
    everything, tokenizer, rest, again = made
    assert {*everything} - {*rest} == {check.name for check in CHECKS if check.when == EARLY}
    assert tokenizer == again != []
    assert capfd.readouterr().err.count("warning: an early one") == 1


@pytest.mark.parametrize(
    ("stage", "fsdp", "kind"), [(2, "", "DEEPSPEED"), (None, "full_shard", "FSDP"), (None, "", "")]
)
def test_the_checks_get_what_accelerate_was_launched_with(stage, fsdp, kind, tmp_path):
    zero = {"zero_optimization": {"stage": stage}} if stage else None
    plugin = SimpleNamespace(deepspeed_config=zero) if stage else None
    setup = started(tmp_path, deepspeed_plugin=plugin, fsdp=fsdp).setup
    assert (setup.started, setup.processes, setup.accelerate["distributed_type"]) == (True, 2, kind)
    assert deepspeed_config(None, setup.accelerate) == zero


def test_a_dry_run_does_what_comes_before_the_first_step_and_changes_no_file(train, tmp_path):
    run_dir = tmp_path / "run"
    line = f"dry run  ready for the first step; nothing was written to {run_dir}"
    code, lines = train(*LORA, "--dry_run")
    assert (code, lines[-1], run_dir.exists()) == (0, line, False)
    assert any(line.startswith("2 prompts x 2 completions = 4") for line in lines)
    train(*LORA, "--save_steps=1", "--save_strategy=steps")
    (run_dir / checkpoints.FINISHED).unlink()
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    code, lines = train(*LORA, "--save_steps=1", "--save_strategy=steps", "--dry_run")
    assert (code, lines[-1]) == (0, line)
    assert any(line.startswith("Resuming from ") for line in lines)
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before
    assert train(*LORA, "--beta=0.5", "--dry_run")[0] == 2  # another run's settings


def test_a_run_leaves_its_settings_its_history_its_results_and_its_best_checkpoint(
    train, small, tmp_path, monkeypatch, caplog
):
    run_dir = tmp_path / "run"

    def graded(*batch, **settings):
        grades = grade_batch(*batch, **settings)
        right = (run_dir / "after.json").exists()  # what follows is the evaluation of the best checkpoint
        return [grade._replace(verdict=Verdict.CORRECT) for grade in grades] if right else grades

    monkeypatch.setattr(evaluator, "grade_batch", graded)
    code, lines = train(*LORA, "--hub_token=hf_secret", "--no_cuda", report=True)
    assert code == 0
    assert "warning: no_cuda is now use_cpu: rename the field" in lines
    assert not any(line.startswith("{") for line in lines), "transformers prints no metrics"
    assert os.environ["HF_TOKEN"] == "hf_secret"
    threads = f"threads of a process: {torch.get_num_threads()} (OMP_NUM_THREADS)"
    assert f"2 prompts x 2 completions = 4 = 1 CPU process x 4 rows x 1 step; {threads}" in lines
    assert (
        "best     checkpoint-1: +100.0 points [-20.5, +100.0] against the last weights, on 4 problems that did not "
        "choose it: they do not differ clearly"
    ) in lines
    assert [line for line in lines if " of 3: " in line] == [
        "1 of 3: evaluating before training",
        "2 of 3: training",
        "3 of 3: evaluating after training",
    ]

    assert sorted(path.name for path in run_dir.iterdir()) == [
        *(".lock", "adapter", "after.json", "before.json", "best.json", "checkpoint-1", "checkpoint-3", "completions"),
        *("config.yaml", "finished.json", "history.jsonl", "plots", "problems.txt", "report.html"),
        *("switched_off.json", "training_history.json"),
    ]
    read = {path.stem: json.loads(path.read_text()) for path in run_dir.glob("*.json")}
    assert read["best"] == {"step": 1, "metric": PRODUCTS, "value": 0.0, "path": "checkpoint-1"}
    # LoRA has dropout by default.
    assert read["switched_off"] == {"switched_off": {"shared prefill": ["the model generates with dropout"]}}
    assert caplog.text.count("Switched off: shared prefill: the model generates with dropout; ") == 1
    assert read["finished"] == {"step": 3, "weights": "adapter"}
    before, after = read["before"], read["after"]
    assert {name: before.get(name) for name in SAME} == {name: after.get(name) for name in SAME}
    assert (before.get("adapter"), after["adapter"]) == (None, str(run_dir / "adapter"))
    assert (before["data"], before["split"], before["contamination"]["overlapping"]) == ("generated:sums", "heldout", 0)
    held_out = [line for line in history(run_dir) if PRODUCTS in line]
    assert [(line["step"], line["eval_generated_products_n"]) for line in held_out] == [(n, 2) for n in (1, 2, 3)]
    assert metrics.HELDOUT_ACCURACY not in held_out[0]

    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["model_name_or_path"] == config["stated"]["model_name_or_path"] == small
    assert (config["stated"]["max_steps"], "beta" in config["stated"]) == (3, False)
    assert config["command"].startswith(f"grpo_math.train --model_name_or_path {small} ")

    last, final = (load_file(run_dir / name / "adapter_model.safetensors") for name in ("checkpoint-3", "adapter"))
    assert all(torch.equal(last[name], tensor) for name, tensor in final.items())


@pytest.mark.slow
def test_without_a_word_128_problems_are_evaluated_and_the_table_of_metrics_names_all_that_is_logged(train, tmp_path):
    run_dir, lines = tmp_path / "run", "\n".join(train(*BEST, "--max_steps=3")[1])
    assert re.search(
        r"before and after training 128 problems of \S+, heldout, are evaluated: 256 additional completions", lines
    )
    assert len(json.loads((run_dir / "before.json").read_text())["rows"]) == 128
    of_step = promised({"rollout", "graded", "clip"}, ["letters"], map(str, Verdict))
    assert set(next(line for line in history(run_dir) if metrics.LOSS in line)) == of_step
    of_default = {"step", "epoch", *(promised({"heldout"}) - promised(set()))}
    for line in (line for line in history(run_dir) if metrics.LOSS not in line):
        assert {name for name in line if not name.startswith("eval_generated_sums_")} == of_default
    assert "against the last weights, on 128 problems that did not choose it" in lines
    assert (run_dir / "model/model.safetensors").exists()
    assert "adapter" not in json.loads((run_dir / "after.json").read_text())["rows"][0]


def test_only_the_main_process_looks_for_the_evaluation_before_training(monkeypatch, tmp_path):
    monkeypatch.setattr("grpo_math.train.program.broadcast_from_main", lambda call: True)  # its file is not here
    run = started(tmp_path, EvaluationPlan(ONE, [], None), resume_from_checkpoint="checkpoint-1")
    run.evaluate("before")  # without a model, which an evaluation would need
    assert not hasattr(run, "last_evaluation")


@pytest.mark.parametrize("whole", [None, ONE])
def test_the_best_checkpoint_is_not_compared_on_problems_that_chose_it(whole, tmp_path, capsys):
    run = started(tmp_path, EvaluationPlan(whole, [ONE], None), load_best_model_at_end=False)
    run.trainer, run.is_main = SimpleNamespace(state=SimpleNamespace(global_step=4, best_global_step=2)), True
    run.compare_best()
    assert capsys.readouterr().out == (
        "best     checkpoint-2, not compared: no held-out problem is left that did not choose it\n"
    )


@pytest.mark.parametrize(
    ("stated", "variables", "expected"),
    [
        ({}, {}, "expandable_segments:True"),
        ({"use_vllm": True, "vllm_mode": "server"}, {}, "expandable_segments:True"),
        ({"use_vllm": True}, {}, None),
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "backend:native"),
        ({}, {"PYTORCH_ALLOC_CONF": "backend:native"}, None),
    ],
)
def test_the_allocators_segments_grow_except_next_to_a_colocated_vllm(stated, variables, expected, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(variables))
    _lay_out_memory(RunSettings(stated))
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == expected


# What cannot work


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--per_device_train_batch_size=3"], {}, "not a whole number of groups of 2: use 4, or gradient_acc"),
        (["--dataset_limit=1"], {}, "leaves 1 problem, and a step takes 2"),
        (["--eval_n=4"], {"ACCELERATE_USE_FSDP": "true"}, "eval_n=4 needs the whole model on each process"),
        (["--deepspeed=deepspeed/zero2.json"], {}, "error: deepspeed="),
        (
            [],
            {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "10.0.0.1"},
            "distributed_type='MULTI_CPU' makes accel",
        ),
        (["--use_cpu=false"], {"WORLD_SIZE": "2"}, "1 of 2 processes found each other (DistributedType.NO): check"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_by_the_main_process(
    arguments, environment, message, train, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    pauses = []
    monkeypatch.setattr("time.sleep", pauses.append)
    os.environ.update(environment, ACCELERATE_DEEPSPEED_CONFIG_FILE="deepspeed/zero3.json")
    code, (line,) = train("--model_name_or_path=no/such/model", *arguments)
    assert (code, pauses) == (2, [])
    assert message in line
    # Any other rank waits, because torch's agent ends all ranks when the first one exits.
    os.environ["RANK"] = "1"
    assert train("--model_name_or_path=no/such/model", "--no_cuda", *arguments) == (2, [])
    assert len(pauses) == 1
    assert not (tmp_path / "run").exists()
    # accelerate would look for the file in the current folder alone.
    assert os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(launching.ROOT / "deepspeed/zero3.json")


def test_a_reward_gets_each_column_of_the_file_and_trls_own_reward_its_solution(train, tmp_path):
    def by_column(completions, solution, ease, steps, **columns):
        seen.update(solution=set(solution), ease=set(ease), prompt="prompt" in columns)
        return [float(len(str(text)) % 7) + len(step or "") for text, step in zip(completions, steps, strict=True)]

    seen, file = {}, tmp_path / "mine.jsonl"
    file.write_text(
        '{"problem": "2 + 3?", "answer": "5", "solution": "so $5$", "ease": 1}\n'
        '{"problem": "3 + 3?", "answer": "6", "solution": "so $6$", "steps": ["a", "b"]}\n'
    )
    of_data = ("--dataset", file, "--prompt_template=boxed", "--rewards", "mine:reward", "trl.rewards:accuracy_reward")
    code, lines = train(*of_data, "--max_steps=1", "--eval_n=0", "--save_strategy=no", reward=by_column)
    assert (code, [line for line in lines if line.startswith("best ")]) == (0, [])
    assert seen == {"solution": {"so $5$", "so $6$"}, "ease": {1, None}, "prompt": False}
    assert {"rewards/by_column/mean", "rewards/accuracy_reward/mean"} <= set(history(tmp_path / "run")[0])


# Real problems, and evaluations in between


@pytest.mark.full
def test_two_steps_on_real_gsm8k_rows_through_accelerate(data_dir, tiny, tmp_path):
    launching.run(
        [
            *(*launching.accelerate("cpu", tmp_path), "-m", "grpo_math.train", "--config", "gsm8k_smoke_cpu"),
            *("--output_dir", str(tmp_path / "run"), "--model_name_or_path", tiny(), "--max_completion_length", "24"),
        ]
    )
    # The command line wins over the recipe.
    assert "\nmax_completion_length: 24\n" in (tmp_path / "run/config.yaml").read_text()
    assert [line["step"] for line in history(tmp_path / "run") if metrics.LOSS in line] == [1, 2]


@pytest.mark.slow
def test_evaluating_in_between_changes_nothing_in_what_is_trained(train, tmp_path):
    plain, evaluated = tmp_path / "plain", tmp_path / "evaluated"
    train("--eval_n=0", output_dir=plain)
    sets = ({"data": "generated:sums", "n": 2}, {"data": "generated:products", "n": 3, "samples": 2, "temperature": 1})
    between = ["--eval_n=4", "--heldout_every=1", "--eval_split=train", "--heldout", *map(json.dumps, sets)]
    _, err = train(*between, output_dir=evaluated)
    assert len({(folder / "model/model.safetensors").read_bytes() for folder in (plain, evaluated)}) == 1
    lines = [line for line in history(evaluated) if "eval_generated_sums_accuracy" in line]
    assert [(line["eval_generated_sums_n"], line["eval_generated_products_n"]) for line in lines] == [(2, 3)] * 4
    # They are trained on.
    assert any("warning: contamination: 4 of 4 problems (100.0%) overlap" in line for line in err)
