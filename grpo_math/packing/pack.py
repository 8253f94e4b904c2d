"""Pack padded rows into one row that contains every prompt once, and unpack the results. Pure torch.

Stock TRL scores B x (longest prompt + longest completion) tokens. The G completions of a prompt need the prompt's keys
and values only once, and padding not at all. So a group becomes

    [prompt without its last token] [last prompt token, completion 1] ... [last prompt token, completion G]

where position ids restart after the prompt for every completion, and each segment attends only to the prompt and itself
(`attention.py`). The last prompt token opens every segment because its prediction is the completion's first token. The
last token of a completion predicts nothing and is omitted. Tokens: (len(prompt) - 1) + sum(len(completion)).

Rows share a prompt if they are of one group and its tokens are equal. Rows without the number of their group, such as
those of a script that calls the scoring method, share a prompt if its tokens are equal.

A script may mask tokens within a prompt or a completion. Such rows are not packed, because the tokens of a segment are
counted, and attend to all tokens before them.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_math.run.speed_ups import switched_off

Range = tuple[int, int]  # first, length


class Unpackable(Exception):
    """The model does not support packed rows."""


class Layout(NamedTuple):
    """Three lists with an entry for each row: prompt key, prompt length, completion length.

    Rows with the same key share their prompt. ``has_holes``: the mask of a row leaves out tokens between others.
    """

    prompts: list[Hashable]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    has_holes: bool


@dataclass(frozen=True)
class PaddedRows:
    """Rows (B, S) as TRL pads them: prompts on the left, completions on the right in the last columns.

    ``group`` (B,): the number of each row's group, or None.
    """

    ids: Tensor
    mask: Tensor
    completion_length: int
    group: Tensor | None = None

    @property
    def arguments(self) -> tuple[Tensor, Tensor, int]:
        """The arguments of TRL's ``_get_per_token_logps_and_entropies`` that are these rows."""
        return self.ids, self.mask, self.completion_length

    def take(self, index: Tensor) -> "PaddedRows":
        """Return some of the rows."""
        return replace(
            self, ids=self.ids[index], mask=self.mask[index], group=None if self.group is None else self.group[index]
        )


@dataclass(frozen=True)
class GroupLayout:
    """The position of a group in the packed row: ``start``, then ``prompt`` tokens, then segments of ``lengths``."""

    start: int
    prompt: int
    lengths: tuple[int, ...]

    def multiplicity(self) -> list[int]:
        """Return how many of TRL's rows contain each token: a prompt is in the row of each completion.

        >>> GroupLayout(start=0, prompt=2, lengths=(1, 3)).multiplicity()
        [2, 2, 1, 1, 1, 1]
        """
        return [len(self.lengths)] * self.prompt + [1] * sum(self.lengths)


@dataclass(frozen=True)
class PackedRow:
    """A packed row of L tokens, N of them scored, and the indices that `unpack` needs."""

    input_ids: Tensor
    position_ids: Tensor
    shift_labels: Tensor  # (1, N): prompt tokens are not scored, and have no label
    groups: tuple[GroupLayout, ...]
    scored_index: Tensor  # (N,) positions of the scored tokens in the row
    padded_index: Tensor  # (N,) their positions in the flattened (B, T)
    shape: tuple[int, int]  # (B, T)


def layout(padded: PaddedRows) -> Layout:
    """Return the layout of rows.

    Rows of a group share a prompt if their prompts are equal, because an environment may give the completions of a
    group different prompts. Without groups the key is the prompt itself.

    >>> ids, mask = torch.tensor([[0, 5, 6, 7, 8], [0, 5, 6, 9, 9]]), torch.tensor([[0, 1, 1, 1, 0]] * 2)
    >>> layout(PaddedRows(ids, mask, 2))
    Layout(prompts=[(5, 6), (5, 6)], prompt_tokens=[2, 2], completion_tokens=[1, 1], has_holes=False)
    >>> [layout(PaddedRows(ids, mask, 2, torch.tensor(group))).prompts for group in ([3, 3], [3, 4])]
    [[(3, 0), (3, 0)], [(3, 0), (4, 0)]]
    >>> others = (ids * torch.tensor([[1], [2]]), mask), (ids, mask * torch.tensor([[1] * 5, [0, 0, 1, 1, 1]]))
    >>> [layout(PaddedRows(*other, 2, torch.tensor([3, 3]))).prompts for other in others]
    [[(3, 0), (3, 2)], [(3, 0), (3, 2)]]
    >>> masks = [torch.tensor([mask]) for mask in ([0, 1, 1, 0, 1], [1, 0, 1, 1, 1])]
    >>> [layout(PaddedRows(ids[:1], mask, 2)).has_holes for mask in masks]
    [True, True]
    """
    group, width, attended = padded.group, padded.ids.size(1), padded.mask != 0
    split = width - padded.completion_length
    prompt_ids, prompt_mask = padded.ids[:, :split], attended[:, :split]
    counts = prompt, completion = [part.sum(dim=1, keepdim=True) for part in (prompt_mask, attended[:, split:])]
    place = torch.arange(width, device=padded.ids.device)
    is_whole = (attended == ((place >= split - prompt) & (place < split + completion))).all(dim=1, keepdim=True)
    if group is None:
        columns = [prompt_ids]
    else:
        # The first row of each row's group, without a transfer.
        first = (group[:, None] == group).int().argmax(dim=1)
        differs = (prompt_ids != prompt_ids[first]) & prompt_mask | (prompt_mask != prompt_mask[first])
        # 0 for the prompt of the group's first row, else a number that only this row has.
        numbers = torch.arange(1, len(group) + 1, device=group.device)
        columns = [group[:, None], (numbers * differs.any(dim=1))[:, None]]
    # One transfer for all columns, because each transfer makes the CPU wait for the GPU.
    rows = torch.cat([*counts, is_whole & (prompt > 0), *columns], dim=1).tolist()
    starts = [3 if group is not None else split + 3 - row[0] for row in rows]
    keys: list[Hashable] = [tuple(row[start:]) for row, start in zip(rows, starts, strict=True)]
    if has_holes := not all(row[2] for row in rows):
        switched_off("packing", "a mask leaves out tokens within a prompt or a completion")
    return Layout(keys, [row[0] for row in rows], [row[1] for row in rows], has_holes)


def pack(padded: PaddedRows, every_token: bool = False) -> PackedRow | None:
    """Pack rows into one.

    Rows that share a prompt (`layout`) need not be neighbours. Rows without a completion token are skipped. Without
    any token, or with a hole in a mask, the result is None. With ``every_token`` rows without a completion token and
    the last token of each completion are included, because the auxiliary loss of a router also counts tokens that
    predict nothing.

    >>> ids = torch.tensor([[0, 5, 6, 7, 8], [0, 5, 6, 9, 0]])
    >>> row = pack(PaddedRows(ids, torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 1, 0]]), 2))
    >>> row.input_ids, row.position_ids, row.shift_labels
    (tensor([[5, 6, 7, 6]]), tensor([[0, 1, 2, 1]]), tensor([[7, 8, 9]]))
    >>> row.groups
    (GroupLayout(start=0, prompt=1, lengths=(2, 1)),)
    >>> pack(PaddedRows(ids, torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 0, 0]]), 2), every_token=True).groups
    (GroupLayout(start=0, prompt=1, lengths=(3, 1)),)
    >>> pack(PaddedRows(ids, torch.tensor([[0, 1, 1, 0, 0], [0, 1, 1, 0, 0]]), 2)) is None
    True
    """
    completion_length, (batch, width) = padded.completion_length, padded.ids.shape
    prompts, prompt_lengths, lengths, has_holes = layout(padded)
    rows_of: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        if lengths[row] or every_token:
            rows_of.setdefault(prompt, []).append(row)
    if has_holes or not any(lengths):
        return None
    taken, positions, scored, placed, groups = _ranges(
        list(rows_of.values()), prompt_lengths, lengths, width, completion_length, int(every_token)
    )
    start = sum(n for _, n in taken)
    # One transfer of all indices to the GPU.
    ranges = [torch.arange(first, first + n) for first, n in (*taken, *positions, *scored, *placed)]
    index = torch.cat(ranges).to(padded.ids.device, non_blocking=True)
    n = sum(length for _, length in scored)
    token_index, position_ids, scored_index, padded_index = index.split([start, start, n, n])
    ids = padded.ids.reshape(-1)
    return PackedRow(
        input_ids=ids[token_index][None],
        position_ids=position_ids[None],
        # The label of a position is the token after it, in the padded row where it comes from.
        shift_labels=ids[token_index[scored_index] + 1][None],
        groups=tuple(groups),
        scored_index=scored_index,
        padded_index=padded_index,
        shape=(batch, completion_length),
    )


def _ranges(
    rows_of: list[list[int]],
    prompt_lengths: list[int],
    lengths: list[int],
    width: int,
    completion_length: int,
    unscored: int,
) -> tuple[list[Range], list[Range], list[Range], list[Range], list[GroupLayout]]:
    """Return ranges of indices for the tokens in the flattened rows, their positions, and the scored tokens in the
    packed row and in the flattened (B, T); and the groups. A segment ends with ``unscored`` tokens that are not scored.
    """
    taken, positions, scored, padded, groups = [], [], [], [], []
    start = 0
    for rows in rows_of:
        prompt = prompt_lengths[rows[0]] - 1
        # A prompt is padded on the left, so its last token is the one before its completion.
        first = (rows[0] + 1) * width - completion_length - prompt - 1
        taken.append((first, prompt))
        positions.append((0, prompt))
        offset = start + prompt
        for row in rows:
            length = lengths[row]
            # From the last prompt token to the last but one of the completion: what predicts the completion's tokens.
            taken.append(((row + 1) * width - completion_length - 1, length + unscored))
            positions.append((prompt, length + unscored))
            scored.append((offset, length))
            padded.append((row * completion_length, length))
            offset += length + unscored
        groups.append(GroupLayout(start, prompt, tuple(lengths[row] + unscored for row in rows)))
        start = offset
    return taken, positions, scored, padded, groups


def unpack(values: Tensor, row: PackedRow) -> Tensor:
    """Return the numbers of scored tokens (1, N) as (B, T), with 0 for padding.

    >>> row = pack(PaddedRows(torch.tensor([[5, 6, 7, 0]]), torch.tensor([[1, 1, 1, 0]]), 2))
    >>> unpack(torch.tensor([[20.0]]), row)
    tensor([[20.,  0.]])
    """
    batch, length = row.shape
    flat = values.new_zeros(batch * length)
    return flat.scatter(0, row.padded_index, values.reshape(-1)).view(batch, length)
