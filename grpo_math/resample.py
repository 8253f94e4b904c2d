"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups that teach nothing give way to fresh prompts.

A group whose completions are all right or all wrong has no contrast in correctness. It is judged by verdict: a shaped
sum of rewards can differ within such a group, and would make it look informative.

Does not generate: trainer.py does, and draws its fresh prompts from a `Reserve`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any


def informative(right: Sequence[bool | None]) -> bool:
    """Whether a group has both right and wrong completions; None is one that could not be graded.

    >>> informative([True, False, None]), informative([False, None]), informative([None])
    (True, False, False)
    """
    return True in right and False in right


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
