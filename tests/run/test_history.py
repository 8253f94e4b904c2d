"""Every line of history.jsonl holds what metrics.py promises for the settings, and its phases add up to the step."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from small_runs import promised
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from grpo_math.checks.live import Diagnosis
from grpo_math.grading import GRADER, Verdict
from grpo_math.run import metrics
from grpo_math.run.log import History, trackers
from grpo_math.train import heldout
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.run_files import RunFiles
from grpo_math.trainer.trainer import MathGRPOTrainer

ROWS = [{"prompt": f"What is {a} + 4?", "answer": str(a + 4)} for a in range(8)]
ENDS = range(2, 49152, 8)  # the tokens that end a completion of the tiny models
PHASES = (*metrics.PHASES, metrics.SECONDS_UPDATE)


def ramp(completions, **columns):
    return [float(i % 4) for i in range(len(completions))]


def trained(model, tokenizer, folder, rows=ROWS, reward=ramp, callbacks=lambda trainer, history: [], **settings):
    """A trainer after two steps, and the lines of its history."""
    args = {
        "use_cpu": True,
        "bf16": False,
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
    }
    trainer = MathGRPOTrainer(
        model=model,
        reward_funcs=[reward, "accuracy"],
        args=MathGRPOConfig(str(folder), **{**args, **settings}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    (history,) = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, RunFiles))
    for callback in callbacks(trainer, history):
        trainer.add_callback(callback)
    trainer.train()
    return trainer, history.lines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "when"),
    [
        ({}, {"clip"}),
        ({"beta": 0.1}, {"clip", "kl"}),
        ({"num_iterations": 2}, {"clip"}),
        ({"mask_truncated_completions": True}, {"clip"}),
        ({"surrogate": "reinforce", "beta": 0.1, "num_iterations": 2}, {"clip", "kl"}),
        ({"loss_type": "sapo"}, set()),
        ({"pack_updates": False, "beta": 0.1, "mask_truncated_completions": True}, {"clip", "kl"}),
        ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "steps_per_generation": 4}, {"clip"}),
    ],
    ids=lambda value: ",".join(sorted(value)),
)
def test_a_line_holds_exactly_what_the_table_promises(settings, when, tiny, tokenizer, tmp_path):
    _, lines = trained(tiny(), tokenizer, tmp_path, **settings)
    reused = "num_iterations" in settings or "steps_per_generation" in settings
    assert [line["step"] for line in lines] == [1, 2]
    for i, line in enumerate(lines):
        fresh = not (reused and i)
        expected = promised(
            when | ({"rollout", "graded"} if fresh else set()),
            rewards=["ramp", "accuracy"] if fresh else [],
            verdicts=map(str, Verdict) if fresh else [],
        )
        assert set(line) == expected
        assert (line[metrics.SECONDS_GENERATE] > 0) == fresh
        assert line[metrics.TOKENS_PER_SECOND] > 0


@pytest.mark.slow
def test_the_phases_add_up_to_the_step_also_where_one_line_covers_several(tiny, tokenizer, tmp_path):
    for steps in (1, 4):
        settings = {"max_steps": 4, "num_iterations": 2, "beta": 0.1, "logging_steps": steps}
        _, lines = trained(tiny(), tokenizer, tmp_path / str(steps), **settings)
        assert len(lines) == 4 // steps
        for line in lines:
            seconds = [line[phase] for phase in PHASES if phase in line]
            assert sum(seconds) == pytest.approx(line[metrics.SECONDS_STEP], abs=1e-9)
            assert min(seconds) >= 0


@pytest.mark.slow
def test_each_phase_is_the_time_of_its_own_work(tiny, tokenizer, tmp_path, monkeypatch):
    """A clock that only the slowed work moves: what a phase reports is then exact."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def slowed(name, seconds):
        plain = getattr(MathGRPOTrainer.__mro__[1], name)

        def method(self, *args, **kwargs):
            now[0] += seconds(self)
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(MathGRPOTrainer.__mro__[1], name, method)

    slowed("_generate_single_turn", lambda trainer: 100.0)
    slowed("_calculate_rewards", lambda trainer: 20.0)
    slowed("_compute_loss", lambda trainer: 3.0)
    # Two passes over the rollout for the reference and the old log-probs, one inside the loss: 0.5 each.
    slowed("_get_per_token_logps_and_entropies", lambda trainer: 0.5)
    settings = {"beta": 0.1, "num_iterations": 2, "pack_updates": False, "max_steps": 1}
    _, (line,) = trained(tiny(), tokenizer, tmp_path, **settings)
    found = [line[phase] for phase in (metrics.SECONDS_GENERATE, metrics.SECONDS_GRADE)]
    assert found == [100.0, 20.0]
    assert line[metrics.SECONDS_SCORE] == pytest.approx(1.0)
    assert line[metrics.SECONDS_UPDATE] == pytest.approx(3.5)
    assert line[metrics.SECONDS_STEP] == pytest.approx(124.5)
    tokens = line[metrics.TOKENS]
    assert line[metrics.TOKENS_PER_SECOND] == pytest.approx(tokens / 124.5)


@pytest.mark.slow
def test_bringing_weights_to_vllm_is_a_phase_of_its_own(tiny, tokenizer, tmp_path, monkeypatch):
    trainer, _ = trained(tiny(), tokenizer, tmp_path, max_steps=1)
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def sync():
        now[0] += 7.0

    def generate(self, *args):
        now[0] += 30.0
        synced()
        return [], None

    trainer._metrics["train"].clear()
    synced = trainer.meter.phase(metrics.SECONDS_SYNC)(sync)
    monkeypatch.setattr(MathGRPOTrainer.__mro__[1], "_generate_single_turn", generate)
    trainer.model.train()
    trainer._generate_single_turn([], None, {}, 4)
    log = trainer._metrics["train"]
    assert log[metrics.SECONDS_SYNC] == [7.0]
    assert log[metrics.SECONDS_GENERATE] == [30.0]


def test_the_held_out_accuracy_is_a_line_of_its_own(tmp_path):
    history = History(tmp_path)
    results = {"accuracy": 0.5, "accuracy_in_format": 0.25, "n": 8}
    state = SimpleNamespace(global_step=3, is_world_process_zero=True)
    history.on_log(None, state, None, {"eval_sums_accuracy": 0.5, **heldout.of_default_set(results)})
    (line,) = history.lines()
    of_default = {name for name, metric in metrics.METRICS.items() if metric.when == "heldout"}
    assert set(line) == {metrics.STEP, "eval_sums_accuracy", *of_default}


def test_a_finding_is_said_once_while_training_and_by_the_main_process_alone(tmp_path, capsys):
    history = History(tmp_path)
    main, other = (Diagnosis(history, {"max_completion_length": 64}) for _ in range(2))
    for step in range(1, 61):
        history.append(step, {metrics.TRUNCATED: 0.5, metrics.REWARD: 0.5})
        for callback, first in ((main, True), (other, False)):
            state = SimpleNamespace(global_step=step, max_steps=60, is_world_process_zero=first)
            callback.on_log(None, state, None, logs={metrics.LOSS: 0.0})
    main.on_train_end(None, SimpleNamespace(global_step=60, is_world_process_zero=True), None)
    said = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in said] == [["step 20", "warning"], ["step 40", "warning"]]
    assert "max_completion_length: 128 (truncation)" in said[0]
    assert said[1].endswith("(flat_reward)")


def test_a_run_below_the_base_model_is_said_while_training(tmp_path, capsys):
    history = History(tmp_path)
    history.append(3, {metrics.HELDOUT_ACCURACY: 0.1, metrics.HELDOUT_IN_FORMAT: 0.1, metrics.HELDOUT_N: 64})
    for grader, is_compared in ((GRADER, True), (GRADER - 1, False)):  # the run was resumed with another grader
        (tmp_path / "before.json").write_text(json.dumps({"accuracy": 0.5, "n": 64, "grader": grader}))
        Diagnosis(history, {}).on_train_end(None, SimpleNamespace(global_step=3, is_world_process_zero=True), None)
        assert ("(heldout_worse)" in capsys.readouterr().err) == is_compared


class Tracker(TrainerCallback):
    """Stands for wandb's and trackio's callbacks, which TRL adds for ``report_to``."""

    def __init__(self):
        self.told = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.told.append((state.global_step, dict(logs)))


@pytest.mark.slow
def test_a_tracker_is_told_all_that_the_history_holds_and_the_findings(tiny, tokenizer, tmp_path):
    tracker, settings = Tracker(), {"max_completion_length": 8}

    def callbacks(trainer, history):
        tell = trackers(trainer)
        found = heldout.of_default_set({"accuracy": 0.25, "accuracy_in_format": 0.2, "n": len(ROWS)})
        trainer.evaluate_held_out = lambda: {"eval_sums_accuracy": 0.25, **found}
        trainer.args.eval_strategy, trainer.args.eval_steps = IntervalStrategy.STEPS, 2
        return tracker, Diagnosis(history, settings, interval=20, tell=tell)

    (tmp_path / "before.json").write_text(f'{{"accuracy": 0.9, "n": 512, "grader": {GRADER}}}')
    _, lines = trained(tiny(), tokenizer, tmp_path, callbacks=callbacks, max_steps=4)
    told: dict[int, dict] = {}
    for step, values in tracker.told:
        told.setdefault(step, {}).update(values)
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 4, 4]
    for line in lines:
        assert {name: told[line["step"]][name] for name in line.keys() - {metrics.STEP}}
    assert [step for step, values in told.items() if metrics.HELDOUT_ACCURACY in values] == [2, 4]
    assert told[4][f"{metrics.FINDING_PREFIX}heldout_worse"].startswith("error: held-out accuracy is below")


@pytest.mark.slow
def test_the_truncated_share_is_the_share_of_completions_that_did_not_end(tiny, tokenizer, tmp_path):
    made = []

    def reward(completion_ids, **columns):
        made.extend(completion_ids)
        return [0.0] * len(completion_ids)

    _, (line,) = trained(tiny(), tokenizer, tmp_path, reward=reward, max_steps=1)
    cut = [ids[-1] not in ENDS for ids in made]
    assert 0 < sum(cut) < len(cut)
    assert all(len(ids) == 8 for ids, flag in zip(made, cut, strict=True) if flag)
    assert line[metrics.TRUNCATED] == pytest.approx(sum(cut) / len(cut))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_truncated_completions_that_are_masked_move_no_weight(packed, loss_type, tiny, tokenizer, tmp_path):
    """The gradient is that of the others alone; only what the loss divides by still counts all rows (grpo)."""
    settings = {"max_steps": 1, "loss_type": loss_type, "mask_truncated_completions": True, "pack_updates": packed}
    trainer, _ = trained(tiny(), tokenizer, tmp_path, **settings)
    trainer.model.train()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, 40000, (2, 5), generator=generator).repeat_interleave(4, dim=0)
    mask = torch.tensor([[1] * n + [0] * (6 - n) for n in (6, 3, 0, 1, 0, 5, 2, 0)])  # as TRL leaves it: 0 is masked
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": torch.randint(5, 40000, (8, 6), generator=generator),
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -0.5, 7.0, 2.0, -9.0, 0.0, 1.5, 3.0]),
        "num_items_in_batch": mask.sum(),
    }

    def gradient(kept):
        part = {name: value[kept] if value.dim() else value for name, value in inputs.items()}
        trainer.model.zero_grad()
        trainer.current_gradient_accumulation_steps = 1
        trainer._compute_loss(trainer.model, part).backward()
        return torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])

    every, ended = gradient(torch.ones(8, dtype=torch.bool)), gradient(mask.any(dim=1))
    expected = ended if loss_type == "dapo" else ended * 5 / 8
    assert ((every - expected).norm() / expected.norm()).item() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_a_run_in_which_all_rewards_sit_on_masked_completions_trains_nothing(packed, tiny, tokenizer, tmp_path):
    """End to end, with TRL's own mask: weights do not move for what was cut off, and move for what was not."""

    def only(truncated):
        def reward(completion_ids, **columns):
            cut = [ids[-1] not in ENDS for ids in completion_ids]
            return [float(i) if flag == truncated else 0.0 for i, flag in enumerate(cut)]

        return reward

    moved = {}
    for name, reward in (("cut", only(True)), ("ended", only(False))):
        settings = {"max_steps": 1, "mask_truncated_completions": True, "pack_updates": packed, "baseline": "none"}
        settings |= {"scale_rewards": "none", "reward_weights": [1.0, 0.0], "max_grad_norm": 0.0, "weight_decay": 0.0}
        _, (line,) = trained(tiny(), tokenizer, tmp_path / name, reward=reward, **settings)
        assert 0 < line[metrics.TRUNCATED] < 1
        moved[name] = line[metrics.GRAD_NORM]
    assert moved["cut"] == 0.0
    assert moved["ended"] > 0.0
