"""Every line of history.jsonl holds what metrics.py promises for the settings, and its phases add up to the step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from datasets import Dataset
from small_runs import promised
from transformers import PrinterCallback

from grpo_math.checks.live import Diagnosis
from grpo_math.grading import Verdict
from grpo_math.run import metrics
from grpo_math.run.log import History
from grpo_math.train import heldout
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.run_files import RunFiles
from grpo_math.trainer.trainer import MathGRPOTrainer

ROWS = [{"prompt": f"What is {a} + 4?", "answer": str(a + 4)} for a in range(8)]
PHASES = (*metrics.PHASES, metrics.SECONDS_UPDATE)


def ramp(completions, **columns):
    return [float(i % 4) for i in range(len(completions))]


def trained(model, tokenizer, folder, **settings):
    """The lines of a history of two steps."""
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
        reward_funcs=[ramp, "accuracy"],
        args=MathGRPOConfig(str(folder), **{**args, **settings}),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    (history,) = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, RunFiles))
    trainer.train()
    return history.lines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "when"),
    [
        ({}, {"clip"}),
        ({"surrogate": "reinforce", "beta": 0.1, "num_iterations": 2}, {"clip", "kl"}),
        ({"loss_type": "sapo"}, set()),
        ({"pack_updates": False, "mask_truncated_completions": True}, {"clip"}),
        ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "steps_per_generation": 4}, {"clip"}),
    ],
    ids=lambda value: ",".join(sorted(value)),
)
def test_a_line_holds_exactly_what_the_table_promises(settings, when, tiny, tokenizer, tmp_path):
    lines = trained(tiny(), tokenizer, tmp_path, **settings)
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
    (line,) = trained(tiny(), tokenizer, tmp_path, **settings)
    matches = [line[phase] for phase in (metrics.SECONDS_GENERATE, metrics.SECONDS_GRADE)]
    assert matches == [100.0, 20.0]
    assert line[metrics.SECONDS_SCORE] == pytest.approx(1.0)
    assert line[metrics.SECONDS_UPDATE] == pytest.approx(3.5)
    assert line[metrics.SECONDS_STEP] == pytest.approx(124.5)
    tokens = line[metrics.TOKENS]
    assert line[metrics.TOKENS_PER_SECOND] == pytest.approx(tokens / 124.5)


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
    output = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in output] == [["step 20", "warning"], ["step 40", "warning"]]
    assert "max_completion_length: 128 (truncation)" in output[0]
    assert output[1].endswith("(flat_reward)")
