"""Pack padded rows into one row that contains every prompt once, and unpack the results. Pure torch.

Stock TRL scores B x (longest prompt + longest completion) tokens. The G completions of a prompt need the prompt's keys
and values only once, and padding not at all. So a group becomes

    [prompt without its last token] [last prompt token, completion 1] ... [last prompt token, completion G]

where position ids restart after the prompt for every completion, and each segment attends only to the prompt and itself
(`attention.py`). The last prompt token opens every segment because its prediction is the completion's first token. The
last token of a completion predicts nothing and is omitted. Tokens: (len(prompt) - 1) + sum(len(completion)).

Rows share a prompt if its tokens are equal. The number of a row's group would not do: an environment may give the
completions of a group different prompts, and TRL's scoring method receives tokens only.

Does not run the model.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


class Unpackable(Exception):
    """The model does not support packed rows."""


@dataclass(frozen=True)
class GroupLayout:
    """The position of a group in the packed row: ``start``, then ``prompt`` tokens, then segments of ``lengths``."""

    start: int
    prompt: int
    lengths: tuple[int, ...]


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


def layout(
    input_ids: Tensor, attention_mask: Tensor, completion_length: int
) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
    """Return of each row (B, S) the ids of its prompt, their number, and the number of completion tokens.

    >>> layout(torch.tensor([[0, 5, 6, 7, 8]]), torch.tensor([[0, 1, 1, 1, 0]]), 2)
    ([(5, 6)], [2], [1])
    """
    split = input_ids.size(1) - completion_length
    counts = [part.sum(dim=1, keepdim=True) for part in (attention_mask[:, :split], attention_mask[:, split:])]
    # One transfer for all, because each transfer makes the CPU wait for the GPU.
    rows = torch.cat([*counts, input_ids[:, :split]], dim=1).tolist()
    return [tuple(row[split + 2 - row[0] :]) for row in rows], [row[0] for row in rows], [row[1] for row in rows]


def pack(input_ids: Tensor, attention_mask: Tensor, completion_length: int) -> PackedRow | None:
    """Pack rows (B, S) of left-padded prompt and right-padded completion, the last ``completion_length`` columns.

    Rows with the same prompt need not be neighbours. Rows without a completion token are skipped; without any token the
    result is None.

    >>> ids = torch.tensor([[0, 5, 6, 7, 8], [0, 5, 6, 9, 0]])
    >>> row = pack(ids, torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 1, 0]]), 2)
    >>> row.input_ids, row.position_ids, row.shift_labels
    (tensor([[5, 6, 7, 6]]), tensor([[0, 1, 2, 1]]), tensor([[7, 8, 9]]))
    >>> row.groups
    (GroupLayout(start=0, prompt=1, lengths=(2, 1)),)
    >>> pack(ids, torch.tensor([[0, 1, 1, 0, 0], [0, 1, 1, 0, 0]]), 2) is None
    True
    """
    batch, width = input_ids.shape
    split = width - completion_length
    prompts, prompt_lengths, lengths = layout(input_ids, attention_mask, completion_length)
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, prompt_ids in enumerate(prompts):
        if lengths[row]:
            rows_of.setdefault(prompt_ids, []).append(row)
    if not rows_of:
        return None

    # Ranges (first, length) of indices, which go to the GPU as one tensor.
    taken, positions, scored, padded, groups = [], [], [], [], []
    start = 0
    for rows in rows_of.values():
        prompt = prompt_lengths[rows[0]] - 1
        # A prompt is padded on the left, so its last token is in column ``split - 1``.
        first = rows[0] * width + split - prompt - 1
        taken.append((first, prompt))
        positions.append((0, prompt))
        offset = start + prompt
        for row in rows:
            length = lengths[row]
            # From the last prompt token to the last but one of the completion: what predicts the completion's tokens.
            taken.append((row * width + split - 1, length))
            positions.append((prompt, length))
            scored.append((offset, length))
            padded.append((row * completion_length, length))
            offset += length
        groups.append(GroupLayout(start, prompt, tuple(lengths[row] for row in rows)))
        start = offset
    ranges = [torch.arange(first, first + n) for first, n in (*taken, *positions, *scored, *padded)]
    index = torch.cat(ranges).to(input_ids.device, non_blocking=True)
    n_scored = sum(length for _, length in scored)
    at, position_ids, scored_index, padded_index = index.split([start, start, n_scored, n_scored])
    ids = input_ids.reshape(-1)
    return PackedRow(
        input_ids=ids[at][None],
        position_ids=position_ids[None],
        # The label of a position is the token after it, in the padded row where it comes from.
        shift_labels=ids[at[scored_index] + 1][None],
        groups=tuple(groups),
        scored_index=scored_index,
        padded_index=padded_index,
        shape=(batch, completion_length),
    )


def unpack(values: Tensor, row: PackedRow) -> Tensor:
    """Return the numbers of scored tokens (1, N) as (B, T), with 0 for padding.

    >>> row = pack(torch.tensor([[5, 6, 7, 0]]), torch.tensor([[1, 1, 1, 0]]), 2)
    >>> unpack(torch.tensor([[20.0]]), row)
    tensor([[20.,  0.]])
    """
    batch, length = row.shape
    flat = values.new_zeros(batch * length)
    return flat.scatter(0, row.padded_index, values.reshape(-1)).view(batch, length)
