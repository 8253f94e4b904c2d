"""The rows of a rollout: TRL's dict of tensors with a row for each completion, and of values that all rows share.

The tensors are those of `GRPOTrainer._generate_and_score_completions`: ``prompt_ids`` and ``prompt_mask`` (B, P) padded
on the left, ``completion_ids``, ``completion_mask`` and log-probs (B, T) padded on the right, ``advantages`` (B,), and
``num_items_in_batch``, a number. Pure torch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_math.grading import Verdict
from grpo_math.trainer.packing import layout

Rows = dict[str, Any]


class Rollout(NamedTuple):
    """Completions that were sampled together, group after group, in the order of ranks.

    ``rows``: TRL's tensors of this rank's completions. ``rewards`` (B, F): of all ranks' completions and F reward
    functions. ``verdicts`` (B): of all ranks' completions; None without gold answers.
    """

    rows: Rows
    rewards: Tensor
    verdicts: Sequence[Verdict] | None


def is_per_row(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def is_of_prompt(name: str) -> bool:
    """Return True if a tensor is padded on the left."""
    return name.startswith("prompt")


def padding_of(name: str) -> int:
    """Return the padding value: 1 for a ratio, because vespo multiplies a row's ratios, masked or not; else 0."""
    return int(name == "importance_sampling_ratio")


def select(rows: Rows, index: Sequence[int]) -> Rows:
    """Return the rows with these numbers, in this order.

    >>> select({"advantages": torch.tensor([1.0, 2.0, 3.0]), "num_items_in_batch": 9}, [2, 0])
    {'advantages': tensor([3., 1.]), 'num_items_in_batch': 9}
    """
    at = torch.tensor(index, dtype=torch.long).to(rows["advantages"].device, non_blocking=True)
    return {name: value[at] if is_per_row(value) else value for name, value in rows.items()}


def join(many: Sequence[Rows]) -> Rows:
    """Concatenate rows, padded to the longest prompt and completion. Shared values are those of the first.

    >>> a, b = {"prompt_ids": torch.tensor([[1]])}, {"prompt_ids": torch.tensor([[2, 3]])}
    >>> join([a, b])
    {'prompt_ids': tensor([[0, 1],
            [2, 3]])}
    >>> a, b = ({"importance_sampling_ratio": torch.tensor([ratios])} for ratios in ([0.5], [0.25, 0.75]))
    >>> join([a, b])
    {'importance_sampling_ratio': tensor([[0.5000, 1.0000],
            [0.2500, 0.7500]])}
    """
    joined = dict(many[0])
    for name, value in many[0].items():
        if not is_per_row(value):
            continue
        parts = [rows[name] for rows in many]
        if value.dim() > 1:
            missing = [max(part.size(1) for part in parts) - part.size(1) for part in parts]
            sides = [(n, 0) if is_of_prompt(name) else (0, n) for n in missing]
            parts = [pad(part, side, value=padding_of(name)) for part, side in zip(parts, sides, strict=True)]
        joined[name] = torch.cat(parts)
    return joined


def filled(rows: Rows, index: Sequence[int], size: int) -> Rows:
    """Select rows, and add rows without a token up to ``size`` of them. Without a real row they are two columns wide.

    >>> mask = torch.ones(2, 3, dtype=torch.long)
    >>> rows = {"advantages": torch.tensor([1.0, 2.0]), "completion_mask": mask, "prompt_mask": mask}
    >>> filled(rows, [1], 2)["completion_mask"].tolist()
    [[1, 1, 1], [0, 0, 0]]
    >>> filled(rows, [], 2)["completion_mask"].tolist()
    [[0], [0]]
    """
    selected = select(rows, [*index, *[0] * (size - len(index))])
    # Added rows are masked copies of the first row: their tokens are valid, and add nothing to any sum.
    # `select` has copied the mask, so the buffered rows keep theirs.
    selected["completion_mask"][len(index) :] = 0
    # Another rank has rows in this micro-batch. This rank takes part in its collectives at the least cost.
    if not index:
        for name, value in selected.items():
            if is_per_row(value) and value.dim() > 1:
                selected[name] = value[:, -1:] if is_of_prompt(name) else value[:, :1]
    return selected


def lay_out(rows: Rows) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    """Return `packing.layout` of the rows: prompts, their lengths, and the completions' lengths."""
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
    return layout(ids, mask, rows["completion_ids"].size(1))


def scored(rows: Rows) -> Tensor:
    """Return the mask (B, T) of the tokens that the loss counts: those of the completion that no tool wrote.

    >>> scored({"completion_mask": torch.tensor([[1, 1, 0]]), "tool_mask": torch.tensor([[1, 0, 1]])})
    tensor([[1, 0, 0]])
    """
    return rows["completion_mask"] * rows.get("tool_mask", 1)


def shortest(rows: Rows) -> Rows:
    """Return the row of the shortest completion that has a token, or the first row if none has.

    >>> shortest({"completion_mask": torch.tensor([[1, 1], [0, 0], [1, 0]]), "advantages": torch.arange(3)})
    {'completion_mask': tensor([[1, 0]]), 'advantages': tensor([2])}
    >>> shortest({"completion_mask": torch.zeros(3, 2), "advantages": torch.arange(3)})["advantages"]
    tensor([0])
    """
    lengths = rows["completion_mask"].sum(dim=1)
    return select(rows, [int(lengths.masked_fill(lengths == 0, lengths.max() + 1).argmin())])


def of_all_ranks(rows: Rows, accelerator: Any) -> Rows:
    """Return the rows of all ranks, in the order of ranks."""
    if accelerator.num_processes == 1:
        return rows
    gathered = dict(rows)
    for name, value in rows.items():
        if is_per_row(value):
            if value.dim() > 1:
                # Ranks pad to their own longest row. accelerate gathers only tensors of one shape.
                sides = {"pad_index": padding_of(name), "pad_first": is_of_prompt(name)}
                value = accelerator.pad_across_processes(value, dim=1, **sides)
            gathered[name] = accelerator.gather(value)
    return gathered
