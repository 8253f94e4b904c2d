"""TRL's inputs of a loss as rows: a dict of tensors with a row for each completion, and of values that all rows share.

The tensors are those of `GRPOTrainer._generate_and_score_completions`: ``prompt_ids`` and ``prompt_mask`` (B, P) padded
on the left, ``completion_ids``, ``completion_mask`` and log-probs (B, T) padded on the right, ``advantages`` (B,), and
``num_items_in_batch``, a number. Pure torch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_math.trainer.packing import layout

Rows = dict[str, Any]


def is_per_row(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def is_of_prompt(name: str) -> bool:
    """Whether a tensor is padded on the left."""
    return name.startswith("prompt")


def padding_of(name: str) -> int:
    """What a tensor is padded with: 1 for a ratio, since vespo takes the product of a row's, masked or not."""
    return int(name == "importance_sampling_ratio")


def select(rows: Rows, index: Sequence[int]) -> Rows:
    """The rows of these numbers, in this order.

    >>> select({"advantages": torch.tensor([1.0, 2.0, 3.0]), "num_items_in_batch": 9}, [2, 0])
    {'advantages': tensor([3., 1.]), 'num_items_in_batch': 9}
    """
    at = torch.tensor(index, dtype=torch.long).to(rows["advantages"].device, non_blocking=True)
    return {name: value[at] if is_per_row(value) else value for name, value in rows.items()}


def join(many: Sequence[Rows]) -> Rows:
    """All rows in one, padded to the longest prompt and completion; what rows share is that of the first.

    >>> a, b = {"prompt_ids": torch.tensor([[1]])}, {"prompt_ids": torch.tensor([[2, 3]])}
    >>> join([a, b])
    {'prompt_ids': tensor([[0, 1],
            [2, 3]])}
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
    """`select`, and then rows without a token up to ``size`` of them; two columns wide where there is nothing else.

    >>> mask = torch.ones(2, 3, dtype=torch.long)
    >>> rows = {"advantages": torch.tensor([1.0, 2.0]), "completion_mask": mask, "prompt_mask": mask}
    >>> filled(rows, [1], 2)["completion_mask"].tolist()
    [[1, 1, 1], [0, 0, 0]]
    >>> filled(rows, [], 2)["completion_mask"].tolist()
    [[0], [0]]
    """
    part = select(rows, [*index, *[0] * (size - len(index))])
    # A copy of the first row, masked: it has valid tokens and adds nothing to any sum.
    part["completion_mask"][len(index) :] = 0
    if not index:
        for name, value in part.items():
            if is_per_row(value) and value.dim() > 1:
                part[name] = value[:, -1:] if is_of_prompt(name) else value[:, :1]
    return part


def limited(rows: Rows, limit: int, longer: str) -> tuple[Rows, Tensor]:
    """The rows with at most ``limit`` tokens of prompt and completion in the loss, and which of them (B,) had more.

    ``longer`` says what becomes of those: truncate keeps a completion's first tokens, mask leaves it out whole, as
    TRL's ``mask_truncated_completions`` does with others. A prompt of ``limit`` tokens or more leaves no token.

    >>> mask = torch.ones(2, 3, dtype=torch.long)
    >>> rows = {"prompt_mask": torch.tensor([[0, 1], [1, 1]]), "completion_mask": mask, "completion_ids": mask}
    >>> limited(rows, 4, "truncate")[0]["completion_mask"].tolist()
    [[1, 1, 1], [1, 1, 0]]
    >>> limited(rows, 4, "mask")[0]["completion_mask"].tolist()
    [[1, 1, 1], [0, 0, 0]]
    >>> limited(rows, 3, "truncate")[0]["completion_mask"].tolist()
    [[1, 1], [1, 0]]
    """
    mask = rows["completion_mask"]
    room = (limit - rows["prompt_mask"].sum(dim=1)).clamp(min=0)
    over = mask.sum(dim=1) > room
    if longer == "mask":
        room = room.masked_fill(over, 0)
    position = torch.arange(mask.size(1), device=mask.device)
    mask = mask * (~over[:, None] | (position < room[:, None]))
    # At least one column: TRL's loss cannot do with none.
    width = max(1, int(mask.sum(dim=1).max()))
    left, ratio = {**rows, "completion_mask": mask}, rows.get("importance_sampling_ratio")
    if ratio is not None and ratio.shape == mask.shape:  # a token's, and not a row's
        left["importance_sampling_ratio"] = ratio.masked_fill(mask < rows["completion_mask"], 1.0)
    shorter = {
        name: value[:, :width] if is_per_row(value) and value.dim() > 1 and not is_of_prompt(name) else value
        for name, value in left.items()
    }
    return shorter, over


def lay_out(rows: Rows) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    """`packing.layout` of the rows: prompts, their lengths, and the completions' lengths."""
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
    return layout(ids, mask, rows["completion_ids"].size(1))


def scored(rows: Rows) -> Tensor:
    """The mask (B, T) of the tokens that the loss counts."""
    return rows["completion_mask"] * rows.get("tool_mask", 1)


def shortest(rows: Rows) -> Rows:
    """The row of the shortest completion that has a token, or the first row if none has."""
    lengths = rows["completion_mask"].sum(dim=1)
    return select(rows, [int(lengths.masked_fill(lengths == 0, lengths.max() + 1).argmin())])


def of_all_ranks(rows: Rows, accelerator: Any) -> Rows:
    """The rows of every rank, in the order of ranks."""
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
