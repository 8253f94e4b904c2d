"""The embedded problems: sums, differences and products of two numbers, selected by a seed.

The split depends only on the arithmetic, with the numbers of a sum or a product in order.

    held out  <=>  sha256(key: arithmetic) mod 3 = 0,    arithmetic of 4 + 3  =  arithmetic of 3 + 4  =  "a+b 3 4"

So train and held-out problems are disjoint for every pair of seeds: if "3 + 4" is held out, then so is "4 + 3". The
seed only selects the problems and their order. All choices use sha256 and integers only, so the bytes are the same on
every platform.

>>> generate("heldout", 2)[0]
{'id': 'sums/plus/4,13', 'problem': 'What is 4 + 13?', 'answer': '17', 'level': 1}
>>> len(problems("sums", "train")), len(problems("sums", "heldout"))
(512, 272)

Does not make negative numbers, fractions or decimals: every answer is an integer >= 0.
"""

import operator
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import product
from typing import Any

SPLITS = ("train", "heldout")
# With this key one third of the small levels is held out, within 1% (other keys gave 28% to 39%).
SPLIT_KEY = "split 57"


# The number of a level, an operation (its name in the ids, its sign, its function), and the numbers that it is applied
# to: all pairs of them whose answer is at least 0.
LEVELS: dict[str, tuple[int, str, str, Callable[[int, int], int], range]] = {
    "sums": (1, "plus", "+", operator.add, range(1, 29)),
    "differences": (2, "minus", "-", operator.sub, range(1, 31)),
    "products": (3, "times", "*", operator.mul, range(2, 13)),
    "long_products": (4, "times", "*", operator.mul, range(100, 10_000, 97)),
}


def generate(
    split: str, n: int, seed: int = 0, levels: Sequence[str] = ("sums", "differences")
) -> list[dict[str, Any]]:
    """Return ``n`` different problems of a split, evenly over the levels.

    A level returns at most all its problems, train / held out: sums 512 / 272, differences 312 / 153,
    products 80 / 41, long_products 7,052 / 3,557.

    >>> [row["problem"] for row in generate("train", 2, seed=1, levels=["products"])]
    ['What is 2 * 12?', 'What is 9 * 5?']
    """
    chosen: list[dict[str, Any]] = []
    for i, level in enumerate(levels):
        share = n // len(levels) + (i < n % len(levels))
        chosen += _shuffled(problems(level, split), f"draw {seed}")[:share]
    return _shuffled(chosen, f"order {seed}")


def problems(level: str, split: str) -> list[dict[str, Any]]:
    """Return all problems of a level that belong to the split."""
    number, name, sign, compute, numbers = LEVELS[level]
    rows = []
    for a, b in product(numbers, repeat=2):
        answer = compute(a, b)
        low, high = (a, b) if sign == "-" else sorted((a, b))
        held_out = int.from_bytes(_digest(f"{SPLIT_KEY}: a{sign}b {low} {high}"), "big") % 3 == 0
        if answer >= 0 and held_out == (split == "heldout"):
            rows.append(
                {
                    "id": f"{level}/{name}/{a},{b}",
                    "problem": f"What is {a} {sign} {b}?",
                    "answer": str(answer),
                    "level": number,
                }
            )
    return rows


def _shuffled(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: _digest(f"{key} {row['id']}"))


def _digest(text: str) -> bytes:
    return sha256(text.encode()).digest()
