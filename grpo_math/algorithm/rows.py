"""The rows of a rollout: TRL's dict of tensors with a row for each completion, and of values that all rows share.

The tensors are those of `GRPOTrainer._generate_and_score_completions`: ``prompt_ids`` and ``prompt_mask`` (B, P) padded
on the left, ``completion_ids``, ``completion_mask`` and log-probs (B, T) padded on the right, ``advantages`` (B,), and
``num_items_in_batch``, a number. We add ``group`` (B,), the number of a row's group over all ranks.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, distributed
from torch.nn.functional import pad

from grpo_math.system.collectives import Ranks

Rows = dict[str, Any]


def is_per_row(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def is_prompt_tensor(name: str) -> bool:
    """Return True if a tensor is padded on the left."""
    return name.startswith("prompt")


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
    columns = largest_widths([widths(rows) for rows in many])
    wide = [padded(rows, columns) for rows in many]
    joined = {name: torch.cat([rows[name] for rows in wide]) for name, value in many[0].items() if is_per_row(value)}
    return {**many[0], **joined}


def largest_widths(many: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the largest width of each tensor.

    >>> largest_widths([{"completion_ids": 3}, {"completion_ids": 5}])
    {'completion_ids': 5}
    """
    return {name: max(one[name] for one in many) for name in many[0]}


def masked_row(rows: Rows) -> Rows:
    """Return a copy of the first row without a token, two columns wide: the least that a model can compute.

    >>> mask = torch.ones(2, 3, dtype=torch.long)
    >>> row = masked_row({"advantages": torch.tensor([1.0, 2.0]), "completion_mask": mask, "prompt_mask": mask})
    >>> row["completion_mask"].tolist(), row["prompt_mask"].tolist()
    ([[0]], [[1]])
    """
    row = select(rows, [0])
    for name in widths(row):
        row[name] = row[name][:, -1:] if is_prompt_tensor(name) else row[name][:, :1]
    return {**row, "completion_mask": torch.zeros_like(row["completion_mask"])}


def loss_mask(rows: Rows) -> Tensor:
    """Return the mask (B, T) of the tokens that the loss counts: those of the completion that no tool wrote.

    >>> loss_mask({"completion_mask": torch.tensor([[1, 1, 0]]), "tool_mask": torch.tensor([[1, 0, 1]])})
    tensor([[1, 0, 0]])
    """
    return rows["completion_mask"] * rows.get("tool_mask", 1)


def gather_masked(rows: Rows, kept: Tensor, ranks: Ranks) -> Rows:
    """Mask the rows that are not ``kept`` (B,), and count the tokens that are left. All ranks call this.

    >>> rows = {"completion_mask": torch.tensor([[1, 1], [1, 0]])}
    >>> gather_masked(rows, torch.tensor([0, 1]), Ranks(0, 1, "cpu", gather=lambda count: count))
    {'completion_mask': tensor([[0, 0],
            [1, 0]]), 'num_items_in_batch': tensor(1)}
    """
    mask = rows["completion_mask"]
    rows = {**rows, "completion_mask": mask * kept.to(mask.device)[:, None]}
    # TRL's dapo loss divides by the tokens of all ranks.
    return {**rows, "num_items_in_batch": ranks.gather(loss_mask(rows).sum()).sum()}


def gather_rows(rows: Rows, ranks: Ranks) -> Rows:
    """Gather the rows of all ranks, in the order of ranks. All ranks call this."""
    # Ranks pad to their own longest row. accelerate gathers only tensors of one shape.
    wide = padded(rows, largest_widths(gather_object([widths(rows)])))
    return {name: ranks.gather(value) if is_per_row(value) else value for name, value in wide.items()}


def gather_needed_rows(
    rows: Rows, needed: Sequence[Sequence[int]], columns: Mapping[str, int], ranks: Ranks
) -> tuple[Rows, dict[int, int]]:
    """Send this rank's rows to the ranks that need them, and receive the rows that it needs. All ranks call this.

    Rows are numbered over all ranks, each of which has equally many. ``needed`` has the numbers of each rank's rows,
    ``columns`` the largest width of each tensor on any rank. Return the rows of this rank, and the position of each
    number in them.
    """
    size, this = len(rows["advantages"]), ranks.process_index
    # The rows that each rank sends to this one, and the rows that this one sends to each.
    sources = [[row for row in needed[this] if row // size == rank] for rank in range(len(needed))]
    targets = [[row % size for row in rank_rows if row // size == this] for rank_rows in needed]
    moved = select(padded(rows, columns), list(chain(*targets)))
    if len(needed) > 1:
        received, sent = list(map(len, sources)), list(map(len, targets))
        for name, value in moved.items():
            if is_per_row(value):
                moved[name] = value.new_empty(len(needed[this]), *value.shape[1:])
                distributed.all_to_all_single(moved[name], value.contiguous(), received, sent)
    return moved, {row: position for position, row in enumerate(chain(*sources))}


def widths(rows: Rows) -> dict[str, int]:
    """Return the number of columns of each padded tensor."""
    return {name: value.size(1) for name, value in rows.items() if is_per_row(value) and value.dim() > 1}


def padded(rows: Rows, columns: Mapping[str, int]) -> Rows:
    """Pad each tensor to its number of ``columns``."""
    wider = dict(rows)
    for name, width in columns.items():
        missing = width - rows[name].size(1)
        side = (missing, 0) if is_prompt_tensor(name) else (0, missing)
        # With 1 for a ratio, because vespo multiplies a row's ratios, masked or not.
        wider[name] = pad(rows[name], side, value=int(name == "importance_sampling_ratio"))
    return wider
