"""A finished rollout. Nothing of it is changed: resampling and advantages make another one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from grpo_math.algorithm.rows import Rows
from grpo_math.grading import Verdict

# The columns of the table of completions, by part ("rewards", "extra", or "" for TRL's own) and name.
Columns = dict[tuple[str, str], list[Any]]


@dataclass(frozen=True)
class Rollout:
    """The completions that all ranks train on, group after group, in the order of ranks.

    B are the completions of all ranks, F the reward functions. Only ``tensors`` are those of this rank: TRL's, with the
    number of each row's ``group``.

    >>> import torch
    >>> from collections import defaultdict
    >>> columns = {("", "prompt"): ["a", "a"], ("extra", "verdict"): ["correct", "wrong"]}
    >>> tensors, rewards = {"advantages": torch.zeros(1)}, torch.tensor([[1.0], [0.0]])
    >>> rollout = Rollout(tensors, rewards, torch.tensor([0.5, -0.5]), None, columns, {"reward": [0.5]})
    >>> rollout.rows(slice(1, 2))  # of the second of two ranks
    {'advantages': tensor([-0.5000])}
    >>> table, log = {"prompt": [], "advantages": [], "extra": defaultdict(list)}, defaultdict(list)
    >>> rollout.write(table, log)
    >>> table["advantages"], table["extra"]["verdict"], log["reward"]
    ([0.5, -0.5], ['correct', 'wrong'], [0.5])
    """

    tensors: Rows
    rewards: Tensor  # (B, F), on the CPU
    advantages: Tensor  # (B,), on the CPU
    verdicts: Sequence[Verdict] | None  # B, or None without gold answers
    columns: Columns  # of B entries each
    metrics: Mapping[str, Sequence[float]]

    def rows(self, local: slice) -> Rows:
        """Return TRL's dict of this rank's completions, which are the rows ``local`` of all ranks."""
        device = self.tensors["advantages"].device
        return {**self.tensors, "advantages": self.advantages[local].to(device)}

    def with_metrics(self, values: Mapping[str, float]) -> "Rollout":
        """Return this rollout with these metrics, which replace TRL's of the same name."""
        return replace(self, metrics={**self.metrics, **{name: [value] for name, value in values.items()}})

    def write(self, table: Any, log: Any) -> None:
        """Add the columns to TRL's table, and the metrics to its log."""
        for (part, name), column in {**self.columns, ("", "advantages"): self.advantages.tolist()}.items():
            (table[part][name] if part else table[name]).extend(column)
        for name, values in self.metrics.items():
            log[name].extend(values)
