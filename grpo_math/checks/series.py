"""A run's history as series of numbers: levels, and changes with their certainty. Noise must not look like a finding.

- A *level* is the median of the newest `WINDOW` lines. Each check sets the number of lines that it needs.
- A *change* of a noisy mean (reward, accuracy) is a difference of two windows' means, compared with its standard error.
  The noise of one line comes from successive differences (von Neumann 1941): sigma^2 = mean((x[i+1] - x[i])^2) / 2.
  A slow trend hardly adds to this estimate.

With ``logging_steps`` above 1 a line is a mean over several steps; windows count lines.

symptoms.py judges the series.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

from grpo_math.rewards.functions import SHIPPED
from grpo_math.run import metrics
from grpo_math.run.history import settled

TREND = 40  # lines before a change is judged: the rise of a healthy run is then several standard errors
SKIPPED_SHARE = 0.25  # of the groups; a group without signal has a lower entropy than others
RISE = 0.1  # of the reward's range; a run whose rise is clearly below it (two standard errors) counts as not rising
SATURATED = 0.85  # of the reward's range; above it, a flat reward counts as full
SURE = 2.0  # standard errors of a stated bound
WINDOW = 10  # lines of a level: four outliers do not change a median of 10 much
START = 3  # lines before the rise of a run that learns within `WINDOW` lines: the demo at a rate of 5e-4 takes four


@dataclass(frozen=True)
class Series:
    """The lines that contain one metric."""

    steps: list[int]
    values: list[float]

    def __len__(self) -> int:
        return len(self.values)

    def last(self, lines: int = WINDOW) -> "Series":
        return Series(self.steps[-lines:], self.values[-lines:])

    def first(self, lines: int = WINDOW) -> "Series":
        return Series(self.steps[:lines], self.values[:lines])

    @property
    def span(self) -> str:
        return f"steps {self.steps[0]} to {self.steps[-1]}" if self.steps else "no step"

    @property
    def level(self) -> float:
        return median(self.values[-WINDOW:]) if self.values else 0.0

    @property
    def mean(self) -> float:
        return fmean(self.values) if self.values else 0.0

    @property
    def noise(self) -> float:
        """Standard deviation of one line around a slow trend, from successive differences. Needs two lines."""
        return math.sqrt(fmean((b - a) ** 2 for a, b in pairwise(self.values)) / 2)


class Change(NamedTuple):
    """Change from the first lines (by default `WINDOW`) to the last third: rise of the mean and its standard error."""

    early: Series
    late: Series
    rise: float
    error: float

    def below(self, bound: float) -> bool:
        """Return True if the rise is below ``bound`` by `SURE` standard errors."""
        return self.rise + SURE * self.error < bound

    @property
    def words(self) -> str:
        return f"{fmean(self.early.values):.2f} in {self.early.span}, {fmean(self.late.values):.2f} in {self.late.span}"


class RunSeries:
    """The lines of a history in order, the settings, and the steps of the checkpoints."""

    def __init__(
        self, history: Iterable[Mapping[str, Any]], config: Mapping[str, Any], checkpoints: Iterable[str]
    ) -> None:
        self.config = config
        self.lines = settled(history)
        self.saved = sorted(int(step) for name in checkpoints if (step := name.rpartition("-")[2]).isdigit())

    def get(self, name: str, default: Any) -> Any:
        """Return a setting, or the default if it is absent."""
        value = self.config.get(name)
        return default if value is None else value

    def series(self, name: str) -> Series:
        points = [(line[metrics.STEP], line[name]) for line in self.lines if name in line]
        return Series([step for step, _ in points], [value for _, value in points])

    def change(self, name: str, lines: int = TREND, start: int = WINDOW) -> Change | None:
        """Return the change since the first ``start`` lines; None if there are fewer than ``lines`` lines."""
        series = self.series(name)
        if len(series) < lines:
            return None
        early, late = series.first(start), series.last(len(series) // 3)
        error = series.noise * math.sqrt(1 / len(early) + 1 / len(late))
        return Change(early, late, fmean(late.values) - fmean(early.values), error)

    @cached_property
    def bottom(self) -> float:
        return min(self.series(metrics.REWARD_MIN).values, default=0.0)

    @cached_property
    def span(self) -> float:
        """The range of the rewards so far."""
        return (max(self.series(metrics.REWARD_MAX).values, default=1.0) - self.bottom) or 1.0

    @cached_property
    def comparable(self) -> bool:
        """Return True if early and late rewards can be compared: no resampling chose the problems by reward."""
        return not self.get("resample_groups", 0)

    @cached_property
    def own_rewards(self) -> list[str]:
        """Return the user's rewards if no shipped reward pays for correct answers: those may pay for anything else.

        >>> RunSeries([], {"rewards": ["my_rewards:short", "format_soft"]}, []).own_rewards
        ['short']
        >>> RunSeries([], {"rewards": ["my_rewards:short", "gsm8k"]}, []).own_rewards
        []
        """
        names = [str(name) for name in self.get("rewards", [])]
        if any(name in SHIPPED and SHIPPED[name].needs_gold for name in names):
            return []
        return [name.rpartition(":")[2] for name in names if name not in SHIPPED]

    @cached_property
    def skips_other_groups(self) -> bool:
        """Return True if updates skip another share of the groups than at first: `entropy` is then of other rows."""
        skips = self.get("pack_updates", True) and not self.get("beta", 0.0)
        change = self.change(metrics.DEGENERATE)
        return bool(skips and change and abs(change.rise) > SKIPPED_SHARE)

    @cached_property
    def evaluations(self) -> list[tuple[int, float, float]]:
        """The step, the accuracy and the number of problems of each held-out evaluation."""
        return [
            (line[metrics.STEP], line[metrics.HELDOUT_ACCURACY], line[metrics.HELDOUT_N])
            for line in self.lines
            if metrics.HELDOUT_ACCURACY in line and line.get(metrics.HELDOUT_N)
        ]

    @cached_property
    def not_rising(self) -> Change | None:
        """The reward's change, if it is clearly too small, rewards are not full, and held-out accuracy does not rise.

        None if the reward clearly rose since the first `START` lines.
        """
        change = self.change(metrics.REWARD) if self.comparable else None
        if change is None or not change.below(RISE * self.span):
            return None
        # A run with a high learning rate has learned most within the first window.
        from_start = self.change(metrics.REWARD, start=START) or change
        if from_start.rise - SURE * from_start.error > RISE * self.span:
            return None
        # Held-out problems stay the same, while those of a step may become harder.
        heldout = self.series(metrics.HELDOUT_ACCURACY).values
        if heldout and heldout[-1] - heldout[0] > RISE / 2:
            return None
        # A full reward cannot rise.
        full = fmean(change.late.values) >= self.bottom + SATURATED * self.span
        return None if full else change

    def learning_rate(self, factor: float) -> str:
        """Return the setting times a factor, to two digits."""
        rate = self.get("learning_rate", 0.0) or max(self.series(metrics.LEARNING_RATE).values, default=0.0)
        return f"learning_rate: {rate * factor or 1e-5:.2g}"
