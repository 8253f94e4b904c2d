"""Group the completions of a training run by problem, and explain why a completion was not rewarded.

A group is a problem's G completions in one step. A table that TRL alone wrote lacks the columns of trainer/table.py.

Does not read files (run_dir.py does) or lay out a page (viewer.py does).
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

Row = Mapping[str, Any]
OURS = ("group", "problem_id", "gold", "verdict", "extracted", "in_format", "reward", "tokens", "truncated")
KNOWN = ("step", "prompt", "completion", "advantage", *OURS)  # any other column is a reward function's


class Group(NamedTuple):
    """A problem's completions in one step. ``rewards`` are the sums, if the table has them or they can be added up."""

    step: Any
    rows: list[Row]
    rewards: list[float]


def groups(completions: Sequence[Row]) -> Iterator[Group]:
    """Yield neighbouring completions of the same step and group. The only reward of a table is also the sum.

    >>> table = [{"step": 1, "prompt": p, "accuracy": r} for p, r in (("a", 1.0), ("a", 0.0), ("b", 0.0))]
    >>> [group.rewards for group in groups(table)]
    [[1.0, 0.0], [0.0]]
    """
    for (step, _), neighbours in groupby(completions, key=_key):
        rows = list(neighbours)
        names = [name for name in rows[0] if name not in KNOWN and any(is_number(row.get(name)) for row in rows)]
        sums = [row.get("reward", row.get(names[0]) if len(names) == 1 else None) for row in rows]
        yield Group(step, rows, [value for value in sums if is_number(value)])


def _key(row: Row) -> tuple[Any, Any]:
    # A table that TRL alone wrote has no groups.
    return row["step"], row.get("group", row["prompt"])


def why(row: Row, text: str) -> str:
    """Return why a completion was not rewarded in full or not counted, or "" if that needs no explanation.

    ``row`` is a row of a training table or of an evaluation.

    >>> why({"verdict": "correct", "in_format": False, "reward": 0.0, "gold": "7"}, "It is 7.")
    'correct, but outside the format'
    >>> why({"verdict": "wrong", "extracted": "3", "gold": "7", "reward": 0.0}, "3 + 4 = 7, so #### 3")
    'contains the gold answer, but another was extracted'
    >>> why({"verdict": "correct", "in_format": True, "reward": 1.0, "gold": "7"}, "#### 7")
    ''
    """
    verdict, gold = row.get("verdict"), str(row.get("gold"))[:200]
    if verdict in ("crash", "bad_gold"):
        return "not graded, so it is left out of its group"
    if verdict == "uncheckable":
        return "the answer is too large, or takes too long to compute"
    if verdict == "correct" and row.get("in_format") is False:
        return "correct, but outside the format"
    if verdict == "correct":
        return "correct and in the format, but rewarded 0" if row.get("reward") == 0 else ""
    if row.get("truncated"):
        return "cut at the length limit"
    if verdict and re.search(rf"(?<![\d.]){re.escape(gold)}(?!\d)", text):
        return "contains the gold answer, but another was extracted"
    return "no answer was found" if verdict == "no_answer" else ""


def is_number(value: object) -> bool:
    """Return True for a finite number. pandas, with which TRL writes, makes a missing reward a NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
