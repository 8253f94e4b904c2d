"""Seconds by phase, on a clock that the test sets; what is said of the first rollout."""

from __future__ import annotations

import re

import pytest
from datasets import Dataset
from small_trainers import config, letters
from transformers import TrainerCallback

from grpo_math import MathGRPOConfig, MathGRPOTrainer
from grpo_math.run import metrics
from grpo_math.trainer import meter


def test_the_seconds_of_a_phase_are_without_those_of_phases_within(monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 10.0])
    monkeypatch.setattr(meter.time, "perf_counter", lambda: next(clock))
    log = {metrics.SECONDS_GENERATE: [], metrics.SECONDS_SYNC: []}
    step = meter.StepMeter(lambda: log, rollouts_per_step=1.0)
    with step.phase(metrics.SECONDS_GENERATE), step.phase(metrics.SECONDS_SYNC):
        pass
    assert log == {metrics.SECONDS_GENERATE: [pytest.approx(7)], metrics.SECONDS_SYNC: [pytest.approx(3)]}


@pytest.mark.slow
def test_the_first_rollout_is_reported_before_the_first_update_and_only_then(tiny, tokenizer, tmp_path, capsys):
    rows = Dataset.from_list([{"prompt": f"What is {n} + {n}?", "answer": "7"} for n in range(4)])
    args = config(MathGRPOConfig, tmp_path, max_steps=2, logging_steps=1, max_completion_length=2)
    trainer, said = MathGRPOTrainer(tiny(), letters, args, rows, processing_class=tokenizer), []

    def said_now():
        return [line for line in capsys.readouterr().err.splitlines() if re.match("first rollout|warning", line)]

    class BeforeTheUpdate(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            said.append(said_now())

    trainer.add_callback(BeforeTheUpdate())

    trainer.train()
    (first, *warned), *later = said
    logged = trainer.state.log_history[0]
    for figure in (
        f"first rollout: {float(logged[metrics.TRUNCATED]):.0%} cut at the limit",
        f"{float(logged[metrics.FORMAT_KEPT]):.0%} in the format",
        f"{float(logged[metrics.ACCURACY]):.0%} right",
        f"mean length {float(logged[metrics.LENGTH_MEAN]):.0f}",
        " tokens/s, ",
        " s a step + update",
    ):
        assert figure in first
    assert float(logged[metrics.TRUNCATED]) > 0.5
    assert [line.partition(" ")[0] for line in warned] == ["warning:", "warning:"]
    assert not any(later)
    assert not said_now()
