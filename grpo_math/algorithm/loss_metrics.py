"""Metrics of an optimizer step's loss, over the completions that it computes on all ranks.

TRL logs the mean of each micro-batch, and averages these means. Here micro-batches differ in size, so sums are added up
and divided once. In one unsplit micro-batch the metrics equal TRL's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo_math.algorithm.losses import Loss, Metric, Statistic
from grpo_math.system.collectives import Ranks

COMBINE: dict[Statistic, Callable[[Tensor, Tensor], Tensor]] = {
    Statistic.TOKEN_MEAN: torch.add,
    Statistic.COMPLETION_MEAN: torch.add,
    Statistic.MINIMUM: torch.fmin,
    Statistic.MAXIMUM: torch.fmax,
}


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step, over all ranks.

    ``policy_loss`` is the mean loss of its training steps before the entropy bonus, and ``entropy`` the mean that the
    bonus is computed from.
    """

    metrics: dict[str, float]
    policy_loss: float = 0.0
    entropy: float = 0.0


@dataclass
class LossMetrics:
    """Sums and extremes over the micro-batches of this rank, with the number of computed and skipped completions."""

    skipped_tokens: Tensor | int = 0
    skipped: float = 0
    tokens: Tensor | int = 0
    completions: int = 0
    policy_loss: Tensor | float = 0.0
    entropy_sums: Any = 0.0
    totals: dict[str, Tensor] = field(default_factory=dict)
    declared: dict[str, Metric] = field(default_factory=dict)  # without values

    def add(self, loss: Loss, mask: Tensor, completions: int, weight: float = 1.0) -> None:
        """Add a micro-batch with its mask (B, T), and the ``weight`` of its loss.

        Only the first ``completions`` rows count: a masked row only keeps ranks in step.
        """
        self.completions += completions
        self.tokens = self.tokens + mask.sum()
        self.policy_loss = self.policy_loss + loss.policy_loss * weight
        self.entropy_sums = self.entropy_sums + loss.entropy_sums
        for name, metric in loss.metrics.items():
            total = _total(metric, mask, completions)
            self.totals[name] = COMBINE[metric.statistic](self.totals[name], total) if name in self.totals else total
            self.declared[name] = metric._replace(values=mask)

    def reduce(self, ranks: Ranks, training_steps: int) -> StepResult:
        """Return the result of a step of ``training_steps`` training steps. All ranks call this.

        A metric without values is left out: the step has computed no completion.

        >>> from types import SimpleNamespace
        >>> ranks = Ranks(0, 1, "cpu", gather=lambda sums: sums)
        >>> step, mask = LossMetrics(skipped=2, skipped_tokens=4), torch.ones(1, 2)
        >>> for kl in (0.5, 1.5):
        ...     logged = {
        ...         "kl": Metric(mask * kl),
        ...         "clipped": Metric(torch.tensor([[True, False]]), counts_skipped=True),
        ...         "least": Metric(torch.tensor([[kl]]), Statistic.MINIMUM),
        ...         "largest": Metric(torch.tensor([[kl]]), Statistic.MAXIMUM),
        ...     }
        ...     step.add(Loss(mask.sum(), mask.sum(), torch.tensor([3.0, 1.0]), logged), mask, completions=1)
        >>> step.reduce(ranks, training_steps=2)  # doctest: +NORMALIZE_WHITESPACE
        StepResult(metrics={'kl': 1.0, 'clipped': 0.25, 'least': 0.5, 'largest': 1.5},
                   policy_loss=2.0, entropy=3.0)
        """
        values = [
            *(self.skipped, self.completions, self.skipped_tokens, self.tokens, self.policy_loss),
            *self.entropy_sums,
            *self.totals.values(),
        ]
        # One gather and one transfer for all values, because each transfer makes the CPU wait for the GPU. `full`
        # writes a number without a transfer.
        tensors = [one if isinstance(one, Tensor) else torch.full((), one, device=ranks.device) for one in values]
        by_rank = ranks.gather(torch.stack([one.to(torch.float32) for one in tensors])[None])
        sums, least, most = torch.stack([by_rank.sum(dim=0), by_rank.amin(dim=0), by_rank.amax(dim=0)]).tolist()
        skipped, completions, skipped_tokens, tokens, policy_loss, entropy, entropy_tokens, *_ = sums
        counts = {Statistic.TOKEN_MEAN: (tokens, skipped_tokens), Statistic.COMPLETION_MEAN: (completions, skipped)}
        extremes = {Statistic.MINIMUM: least, Statistic.MAXIMUM: most}
        means: dict[str, float] = {}
        for position, (name, metric) in enumerate(self.declared.items(), len(values) - len(self.totals)):
            if metric.statistic in extremes:
                means |= {name: value} if math.isfinite(value := extremes[metric.statistic][position]) else {}
            elif count := counts[metric.statistic][0] + counts[metric.statistic][1] * metric.counts_skipped:
                means[name] = sums[position] / count
        loss = policy_loss / ranks.num_processes / training_steps
        return StepResult(means, loss, entropy / max(entropy_tokens, 1.0))


def _total(metric: Metric, mask: Tensor, completions: int) -> Tensor:
    """Return the sum or the extreme of a metric in a micro-batch."""
    if metric.statistic is Statistic.TOKEN_MEAN:
        return (metric.values * mask).sum()
    values = metric.values[:completions]
    if metric.statistic is Statistic.COMPLETION_MEAN:
        return values.sum()
    # NaN: a completion without a token has no value.
    bound = math.inf if metric.statistic is Statistic.MINIMUM else -math.inf
    values = torch.cat([values.nan_to_num(nan=bound).flatten(), values.new_full((1,), bound)])
    return values.amin() if metric.statistic is Statistic.MINIMUM else values.amax()
