"""Figures of an optimizer step's loss: means over the tokens of its scored rows, on all ranks.

TRL logs the mean of each micro-batch, and averages these means. Here micro-batches differ in size, so sums are added up
and divided once. In one unsplit micro-batch the figures equal TRL's.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo_math.algorithm.losses import Loss
from grpo_math.run import metrics

# The smallest and the largest share of a completion's tokens: which tokens, and the sign that makes it a maximum.
EXTREMES = {metrics.CLIP_LOWEST: (metrics.CLIP_LOW, -1), metrics.CLIP_HIGHEST: (metrics.CLIP_HIGH, 1)}


@dataclass
class StepFigures:
    """Sums over the micro-batches of this rank.

    ``skipped_tokens`` and ``skipped_rows`` are not scored, because nothing of the loss needs them. Nothing of them is
    clipped, so they count as 0 in the clip fractions, and not in any other figure.
    """

    skipped_tokens: Tensor | int = 0
    skipped_rows: int = 0
    rows: int = 0
    tokens: Tensor | int = 0
    policy_loss: Tensor | float = 0.0
    entropy_sums: Any = 0.0
    sums: dict[str, Tensor] = field(default_factory=dict)
    clipped: set[str] = field(default_factory=set)
    by_row: set[str] = field(default_factory=set)  # figures with one value for each completion
    extremes: dict[str, Tensor] = field(default_factory=dict)  # maxima; a minimum as the maximum of its negative

    def add(self, loss: Loss, mask: Tensor, rows: int, weight: float = 1.0) -> None:
        """Add a micro-batch of ``rows`` completions with its mask (B, T), and the ``weight`` of its loss.

        A masked row without a completion, which only keeps ranks in step, is added with ``rows=0``.
        """
        self.rows += rows
        self.tokens = self.tokens + mask.sum()
        self.policy_loss = self.policy_loss + loss.policy_loss * weight
        self.entropy_sums = self.entropy_sums + loss.entropy_sums
        self.clipped |= loss.clipped.keys()
        for name, value in {**loss.figures, **loss.clipped}.items():
            if value.shape != mask.shape:
                self.by_row.add(name)
            total = value[:rows].sum() if name in self.by_row else (value * mask).sum()
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        for name, (clipped, sign) in EXTREMES.items():
            if clipped in loss.clipped:
                # A completion without a token has no share: NaN, which `fmax` leaves out.
                shares = loss.clipped[clipped].to(loss.loss.dtype)
                shares = shares[:, 0] if clipped in self.by_row else (shares * mask).sum(dim=1) / mask.sum(dim=1)
                largest = (
                    (sign * shares[:rows]).nan_to_num(nan=-torch.inf).amax()
                    if rows
                    else shares.new_full((), -torch.inf)
                )
                self.extremes[name] = torch.fmax(self.extremes.get(name, largest), largest)

    def reduce_means(self, accelerator: Any, training_steps: int) -> tuple[dict[str, float], float, float]:
        """Return the figures of all ranks, which all call this, after a step of ``training_steps`` training steps.

        Return also the mean loss of the training steps before the entropy bonus, and the mean entropy that the bonus is
        computed from.

        >>> from types import SimpleNamespace
        >>> figures, ones = StepFigures(skipped_tokens=2), torch.ones(1, 2)
        >>> is_clipped = {metrics.CLIP_HIGH: torch.tensor([[True, False]])}
        >>> loss = Loss(ones.sum(), ones.sum(), torch.tensor([6.0, 2.0]), is_clipped, {"kl": ones * 0.5})
        >>> figures.add(loss, ones, 1)
        >>> figures.reduce_means(SimpleNamespace(device="cpu", num_processes=1, gather=lambda sums: sums), 1)[0]
        {'kl': 0.5, 'clip_ratio/high_mean': 0.25, 'clip_ratio/high_max': 0.5}
        """
        values = [
            self.skipped_rows,
            self.rows,
            self.skipped_tokens,
            self.tokens,
            self.policy_loss,
            *self.entropy_sums,
            *self.sums.values(),
            *self.extremes.values(),
            # A rank with masked rows of one token alone cannot tell completions from tokens.
            *(name in self.by_row for name in self.sums),
        ]
        # One gather and one transfer for all, because each transfer makes the CPU wait for the GPU. A number is written
        # by `full`, which does not transfer it.
        tensors = [one if isinstance(one, Tensor) else torch.full((), one, device=accelerator.device) for one in values]
        local = torch.stack([one.to(torch.float32) for one in tensors])
        of_ranks = accelerator.gather(local[None])
        sums, largest = torch.stack([of_ranks.sum(dim=0), of_ranks.amax(dim=0)]).tolist()
        skipped_rows, rows, skipped_tokens, tokens, policy_loss, entropy, entropy_tokens, *totals = sums
        figures, end = {}, len(values) - len(self.sums)
        for name, total, is_by_row in zip(self.sums, totals, largest[end:], strict=False):
            count, skipped = (rows, skipped_rows) if is_by_row else (tokens, skipped_tokens)
            figures[name] = total / max(count + skipped * (name in self.clipped), 1.0)
        for name, value in zip(self.extremes, largest[end - len(self.extremes) : end], strict=True):
            figures[name] = EXTREMES[name][1] * value if abs(value) < torch.inf else torch.nan
        return figures, policy_loss / accelerator.num_processes / training_steps, entropy / max(entropy_tokens, 1.0)
