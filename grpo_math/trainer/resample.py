"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups that teach nothing give way to fresh prompts.

A group whose completions are all right or all wrong has no contrast in correctness. It is judged by verdict: a shaped
sum of rewards can differ within such a group, and would make it look as if there were something to learn.

Does not generate: trainer.py does, and draws its fresh prompts from a `Reserve`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any


def dull_groups(right: Sequence[bool | None], size: int) -> list[int]:
    """The numbers of the groups of ``size`` completions that are not both right and wrong; None could not be graded.

    >>> dull_groups([True, False, True, True, False, None], size=2)
    [1, 2]
    """
    groups = [right[start : start + size] for start in range(0, len(right), size)]
    return [number for number, group in enumerate(groups) if not (True in group and False in group)]


def replacing(right: Sequence[bool | None], fresh: Sequence[bool | None], size: int) -> list[int]:
    """Which of the completions ``right + fresh`` to go on with: groups of ``fresh`` in the place of dull ones.

    >>> replacing([True, True, True, False], [False, False, False, True], size=2)
    [6, 7, 2, 3]
    """
    index = list(range(len(right)))
    dull = set(dull_groups(fresh, size))
    good = [number for number in range(len(fresh) // size) if number not in dull]
    for old, new in zip(dull_groups(right, size), good, strict=False):
        start = len(right) + new * size
        index[old * size : (old + 1) * size] = range(start, start + size)
    return index


class Reserve:
    """The problems in an order of their own, without end: reshuffled after each pass. Its position is one number.

    >>> reserve = Reserve([{"prompt": name} for name in "abc"], seed=0)
    >>> first = reserve.take(2, avoid=[])
    >>> sorted(row["prompt"] for row in first + reserve.take(1, avoid=[]))
    ['a', 'b', 'c']
    >>> reserve.position = 0
    >>> reserve.take(2, avoid=[]) == first
    True
    """

    def __init__(self, rows: Any, seed: int) -> None:
        self.rows, self.seed, self.position = rows, seed, 0
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self, n: int, avoid: Sequence[Any]) -> list[dict[str, Any]]:
        """The next ``n`` rows. Prompts in ``avoid`` are passed over, unless a whole pass has nothing else."""
        taken: list[dict[str, Any]] = []
        passed = 0
        while len(taken) < n:
            row = self._next()
            if row["prompt"] in avoid and passed < len(self.rows):
                passed += 1
                continue
            taken.append(row)
        return taken

    def _next(self) -> dict[str, Any]:
        epoch, place = divmod(self.position, len(self.rows))
        if self._order[0] != epoch:
            order = list(range(len(self.rows)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        self.position += 1
        return self.rows[self._order[1][place]]
