"""Every line of history.jsonl holds what metrics.py promises for the settings, and its phases add up to the step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from small_runs import promised
from small_trainers import make
from transformers import AutoTokenizer

from grpo_math.checks.live import Diagnosis
from grpo_math.run import metrics
from grpo_math.run.log import History
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.run_files import RunFiles
from grpo_math.trainer.trainer import MathGRPOTrainer

PHASES = (*metrics.PHASES, metrics.SECONDS_UPDATE)


@pytest.fixture
def trained(letters_model, tmp_path):
    """``trained(**settings)`` -> the lines of a history of two steps."""

    def run(**settings):
        tokenizer = AutoTokenizer.from_pretrained(letters_model, padding_side="left")
        settings = {"max_steps": 2, "max_completion_length": 8, "logging_steps": 1, **settings}
        trainer = make(MathGRPOTrainer, MathGRPOConfig, letters_model, tokenizer, tmp_path, **settings)
        (history,) = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, RunFiles))
        trainer.train()
        return history.lines()

    return run


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
def test_a_line_holds_exactly_what_the_table_promises(settings, when, trained):
    reused = "num_iterations" in settings or "steps_per_generation" in settings
    for i, line in enumerate(trained(**settings)):
        fresh = not (reused and i)
        assert line["step"] == i + 1
        assert set(line) == promised(when | ({"rollout"} if fresh else set()), rewards=["letters"] if fresh else [])
        assert (line[metrics.SECONDS_GENERATE] > 0) == fresh
        assert line[metrics.TOKENS_PER_SECOND] > 0
        seconds = [line[phase] for phase in PHASES if phase in line]
        assert sum(seconds) == pytest.approx(line[metrics.SECONDS_STEP], abs=1e-9)
        assert min(seconds) >= 0


@pytest.mark.slow
def test_each_phase_is_the_time_of_its_own_work(trained, monkeypatch):
    """A clock that only the slowed work moves: what a phase reports is then exact."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def slowed(name, seconds):
        plain = getattr(MathGRPOTrainer.__mro__[1], name)

        def method(self, *args, **kwargs):
            now[0] += seconds
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(MathGRPOTrainer.__mro__[1], name, method)

    slowed("_generate_single_turn", 100.0)
    slowed("_calculate_rewards", 20.0)
    slowed("_compute_loss", 3.0)
    # Two passes over the rollout for the reference and the old log-probs, one inside the loss: 0.5 each.
    slowed("_get_per_token_logps_and_entropies", 0.5)
    (line,) = trained(beta=0.1, num_iterations=2, pack_updates=False, max_steps=1)
    names = (metrics.SECONDS_GENERATE, metrics.SECONDS_GRADE, metrics.SECONDS_SCORE, metrics.SECONDS_UPDATE)
    assert [line[name] for name in (*names, metrics.SECONDS_STEP)] == pytest.approx([100.0, 20.0, 1.0, 3.5, 124.5])
    assert line[metrics.TOKENS_PER_SECOND] == pytest.approx(line[metrics.TOKENS] / 124.5)


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
