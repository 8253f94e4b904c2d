"""Seconds by phase, on a clock that the test sets; what is said of the first rollout."""

from __future__ import annotations

import pytest

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
