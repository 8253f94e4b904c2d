"""Plan which rows of an optimizer step are computed together, and on which rank. Pure Python.

A packed row computes each prompt once, so the completions of a prompt belong into one micro-batch. A micro-batch should
be as full as memory allows, and no rank should wait for another. The rows of one optimizer step can be combined freely,
because their gradients are added up: `losses.micro_batch_weight` keeps the weight of each.

A row stays in its optimizer step, and a completion stays whole.
"""

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")
# Tiles of trainer/tiled_mlp.py, which the planner counts without torch: smaller products leave a large GPU idle, and
# 4-bit weights are dequantised once more for each tile.
MIN_TOKENS, MAX_TILES = 1024, 4


def plan_micro_batches(
    prompts: Sequence[Hashable],
    prompt_tokens: Sequence[int],
    completion_tokens: Sequence[int],
    budget: int,
    ranks: int = 1,
) -> list[list[list[int]]]:
    """Return the micro-batches of each rank: lists of row numbers, each of at most ``budget`` tokens.

    The three sequences have an entry for each row. Rows without a completion token are skipped. The tokens of a
    micro-batch are those of its packed row (`packing.pack`): (prompt - 1) once per prompt, and every completion token.
    A group over the budget is split between completions, by length; a single completion over the budget stays whole.
    Ranks get near-equal numbers of tokens; a rank may get none.

    >>> plan_micro_batches("aabb", [5, 5, 3, 3], [2, 4, 6, 0], budget=20)
    [[[0, 1, 2]]]
    >>> plan_micro_batches("aabb", [5, 5, 3, 3], [2, 4, 6, 1], budget=10)
    [[[0, 1], [2, 3]]]
    >>> plan_micro_batches("aaa", [5] * 3, [3] * 3, budget=10)
    [[[0, 1], [2]]]
    >>> plan_micro_batches("aabb", [5, 5, 3, 3], [2, 4, 6, 1], budget=20, ranks=2)
    [[[0, 1]], [[2, 3]]]
    """
    groups: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        if completion_tokens[row]:
            groups.setdefault(prompt, []).append(row)

    def tokens(rows: Sequence[int]) -> int:
        lengths = ([column[row] for row in rows] for column in (prompt_tokens, completion_tokens))
        return packed_tokens([prompts[row] for row in rows], *lengths)

    # A piece is never larger than a rank's fair share, so that one long group cannot keep a rank busy while the others
    # wait.
    total = sum(tokens(rows) for rows in groups.values())
    limit = min(budget, -(-total // ranks))
    pieces = [piece for rows in groups.values() for piece in _split(rows, prompt_tokens, completion_tokens, limit)]
    # Longest processing time first: a greedy rule whose fullest rank has at most 4/3 of the best possible load.
    pieces.sort(key=lambda rows: (-tokens(rows), rows))
    rank_pieces: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for piece in pieces:
        rank = load.index(min(load))
        rank_pieces[rank].append(piece)
        load[rank] += tokens(piece)
    return [
        _fill(pieces_of_rank, [tokens(piece) for piece in pieces_of_rank], budget) for pieces_of_rank in rank_pieces
    ]


def packed_tokens(prompts: Sequence[Hashable], prompt_tokens: Sequence[int], completion_tokens: Sequence[int]) -> int:
    """Return the number of tokens of the packed row of these rows.

    >>> packed_tokens("aab", [5, 5, 3], [2, 4, 6])
    18
    """
    rows = zip(prompts, prompt_tokens, completion_tokens, strict=True)
    shared = {prompt: n - 1 for prompt, n, tokens in rows if tokens}
    return sum(shared.values()) + sum(completion_tokens)


def _split(rows: list[int], prompt_tokens: Sequence[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Split a group into pieces of at most ``limit`` tokens, in order of length."""
    pieces: list[list[int]] = []
    room = 0
    # By length: a row of similar lengths leaves less room unused when the next completion does not fit.
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if not pieces or lengths[row] > room:
            pieces.append([])
            room = limit - (prompt_tokens[row] - 1)
        pieces[-1].append(row)
        room -= lengths[row]
    return [sorted(piece) for piece in pieces]


def _fill(pieces: list[list[int]], tokens: list[int], budget: int) -> list[list[int]]:
    """Put pieces, largest first, into the first micro-batch that has room for them."""
    micro_batches: list[list[int]] = []
    room: list[int] = []
    for piece, size in zip(pieces, tokens, strict=True):
        slot = next((i for i, free in enumerate(room) if size <= free), len(room))
        if slot == len(room):
            micro_batches.append([])
            room.append(budget)
        micro_batches[slot] += piece
        room[slot] -= size
    return micro_batches


def distribute(micro_batches: Sequence[T], steps: int) -> list[list[T]]:
    """Distribute micro-batches over ``steps`` training steps. If there are too few, the first steps stay empty.

    >>> distribute("ab", 3)
    [[], ['a'], ['b']]
    >>> distribute("abc", 2)
    [['a'], ['b', 'c']]
    """
    n = len(micro_batches)
    # Not the last ones, because the last training step synchronises the gradients of all ranks.
    bounds = [max(0, n - steps + i) if n < steps else n * i // steps for i in range(steps + 1)]
    return [list(micro_batches[start:end]) for start, end in pairwise(bounds)]


def largest_micro_batch(budget: int, prompt: int, completion: int, group: int, rows: int) -> tuple[int, int]:
    """Return the largest micro-batch of ``budget`` tokens in a step of ``rows`` rows: the number of completions of full
    length, group by group, and the tokens of a shorter one that fits into the rest. A completion over the budget stays
    whole.

    >>> largest_micro_batch(100, 10, 20, 2, rows=8)  # a group takes 9 + 2 * 20 = 49 tokens; a third prompt leaves none
    (4, 0)
    >>> [largest_micro_batch(*case) for case in ((84, 10, 20, 2, 8), (5, 10, 20, 2, 8), (100, 10, 20, 2, 3))]
    [(3, 6), (1, 0), (3, 0)]
    """
    groups, room = divmod(budget, prompt - 1 + group * completion)
    more, last = divmod(max(0, room - (prompt - 1)), completion)
    full = groups * group + more
    if full == 0:
        return 1, 0
    return (rows, 0) if full >= rows else (full, last)
