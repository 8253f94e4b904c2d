"""The metrics of a step: seconds by phase, tokens per second, memory; verdicts, rewards, advantages.

The trainer opens each phase.
"""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from grpo_math.grading import Verdict
from grpo_math.run import metrics
from grpo_math.run.stateful import Stateful


class StepMeter(Stateful):
    """Logs seconds, tokens and memory of training steps. ``log()`` returns TRL's dict of the mode, train or eval.

    >>> log = {metrics.SECONDS_GENERATE: [], metrics.SECONDS_SYNC: [], metrics.TOKENS: [5], metrics.KL: [0.5]}
    >>> meter = StepMeter(lambda: log, rollouts_per_step=1.0)
    >>> with meter.phase(metrics.SECONDS_GENERATE), meter.phase(metrics.SECONDS_SYNC):
    ...     pass
    >>> [len(values) for values in log.values()]
    [1, 1, 1, 1]
    """

    SAVED = ("rollout_tokens", "tokens_per_step")

    def __init__(self, log: Callable[[], dict[str, list[float]]], rollouts_per_step: float) -> None:
        self.log = log
        self.rollouts_per_step = rollouts_per_step
        self.rollout_tokens: list[int] = []  # of each rollout since the last log line
        self.tokens_per_step = 0.0
        # The metrics without a value in a step since the last log line, because it has computed no completion.
        self.undefined = set[str]()

    def add(self, values: Mapping[str, float]) -> None:
        """Log a value of each of these metrics."""
        for name, value in values.items():
            self.log()[name].append(value)

    def without_value(self) -> dict[str, float]:
        """Return NaN for each metric that no step since the last call has computed: TRL's callbacks expect its name."""
        names = self.undefined - self.log().keys()
        self.undefined = set()
        return dict.fromkeys(sorted(names), math.nan)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Log the seconds spent inside this context, without those of inner phases. Also decorates a function."""
        # Phases are nested (grading within scoring). Inner seconds are subtracted so that phases add up to the step.
        started, before = time.perf_counter(), self._spent()
        yield
        self.log()[name].append(time.perf_counter() - started - (self._spent() - before))

    def _spent(self) -> float:
        """Return the seconds of all phases since the last log line."""
        return sum(sum(self.log().get(phase, ())) for phase in metrics.PHASES)

    def write(self, vllm: bool, cuda: bool) -> None:
        """Log the metrics of whole steps: mean seconds by phase, tokens per second, memory."""
        log = self.log()
        steps = log[metrics.SECONDS_STEP]
        # No call could be timed for the update alone, because TRL generates inside `training_step`.
        log[metrics.SECONDS_UPDATE] = [sum(steps) - self._spent()]
        optional = {*metrics.SERVER_SECONDS, *[metrics.SECONDS_SYNC] * (not vllm)}
        for phase in (*metrics.PHASES, metrics.SECONDS_UPDATE, *metrics.SERVER_SECONDS):
            if phase in log or phase not in optional:
                log[phase] = [sum(log.get(phase, ())) / len(steps)]
        if self.rollout_tokens:  # else the step used an earlier rollout again
            self.tokens_per_step = sum(self.rollout_tokens) / len(self.rollout_tokens) * self.rollouts_per_step
            self.rollout_tokens = []
        if vllm:
            log[metrics.SYNC_SHARE] = [log[metrics.SECONDS_SYNC][0] * len(steps) / sum(steps)]
        log[metrics.TOKENS_PER_SECOND] = [self.tokens_per_step * len(steps) / sum(steps)]
        if cuda:
            log[metrics.MEMORY_ALLOCATED] = [torch.cuda.max_memory_allocated()]
            log[metrics.MEMORY_RESERVED] = [torch.cuda.max_memory_reserved()]
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
        log[metrics.MEMORY_RESIDENT] = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit]


def verdict_metrics(verdicts: Sequence[str], in_format: Sequence[bool | None], size: int) -> dict[str, float]:
    """Return the shares of completions by verdict, and of groups of ``size`` that are all correct or all wrong.

    ``in_format`` is None for a completion whose row names no format: then no metric of the format is logged.

    >>> log = verdict_metrics(["correct", "correct", "wrong", "crash"], [True, False, True, True], 2)
    >>> log["grading/crash"], log["accuracy"], log["degenerate/all_right"], log["degenerate/all_wrong"]
    (0.25, 0.5, 0.5, 0.5)
    >>> log["accuracy_in_format"], "accuracy_in_format" in verdict_metrics(["correct", "wrong"], [None, None], 2)
    (0.25, False)
    """
    correct = [verdict == Verdict.CORRECT for verdict in verdicts]
    groups = [correct[start : start + size] for start in range(0, len(correct), size)]
    log = {}
    if None not in in_format:
        log[metrics.FORMAT_RATE] = in_format.count(True) / len(correct)
        log[metrics.ACCURACY_IN_FORMAT] = [*zip(correct, in_format, strict=True)].count((True, True)) / len(correct)
    return {
        **log,
        **{metrics.verdict_key(str(verdict)): verdicts.count(str(verdict)) / len(verdicts) for verdict in Verdict},
        metrics.ACCURACY: sum(correct) / len(correct),
        metrics.ALL_RIGHT: sum(map(all, groups)) / len(groups),
        metrics.ALL_WRONG: sum(not any(group) for group in groups) / len(groups),
    }


def reward_metrics(rewards: Tensor, advantages: Tensor) -> dict[str, float]:
    """Return the metrics of the rewards (P, G) and advantages (P * G,) of all ranks.

    >>> reward_metrics(torch.tensor([[1.0, 0.0], [torch.nan, 0.5]]), torch.tensor([1.0, -1.0, 0.0, 0.0]))["reward_max"]
    1.0
    """
    least, most = (rewards.where(~rewards.isnan(), bound) for bound in (torch.inf, -torch.inf))
    mean, deviation, low, high = torch.stack(
        [advantages.mean(), advantages.std(correction=0), least.min(), most.max()]
    ).tolist()
    log = {metrics.ADVANTAGE_MEAN: mean, metrics.ADVANTAGE_STD: deviation}
    if low <= high:  # else no completion was graded
        log |= {metrics.REWARD_MIN: low, metrics.REWARD_MAX: high}
    return log
