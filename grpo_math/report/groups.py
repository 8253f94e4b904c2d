"""The completions of a training run, from TRL's table -> groups of a problem, and why each was paid what it was.

A group is a problem's G completions in one step. A table that TRL alone wrote lacks the columns of trainer/table.py.

Does not read files (run_dir.py does) or lay out a page (viewer.py does).
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from grpo_math.report.text import text_of

Row = Mapping[str, Any]
OURS = ("group", "problem_id", "gold", "verdict", "extracted", "in_format", "reward", "tokens", "truncated")
KNOWN = ("step", "prompt", "completion", "advantage", *OURS)  # any other column is a reward function's


class Group(NamedTuple):
    """A problem's completions in one step. ``rewards`` are the sums, if the table has them or they can be added up."""

    step: Any
    rows: list[Row]
    rewards: list[float]

    @property
    def spread(self) -> float | None:
        """The standard deviation of the rewards. A group with 0 does not change the weights."""
        return pstdev(self.rewards) if self.rewards else None

    @property
    def mean(self) -> float | None:
        return fmean(self.rewards) if self.rewards else None

    @property
    def title(self) -> str:
        """The step, the problem, its gold answer, and the result.

        >>> rows = [{"problem_id": "a", "gold": "7", "verdict": v, "reward": 0.0} for v in ("correct", "wrong")]
        >>> Group(3, rows, [0.0, 0.0]).title
        'step 3, problem a, gold 7: 1 of 2 right, every reward 0: moves no weight'
        """
        words, first, results = [f"step {self.step}"], self.rows[0], []
        words += [f"{name} {first[key]}" for name, key in (("problem", "problem_id"), ("gold", "gold")) if key in first]
        if "verdict" in first:
            results.append(f"{sum(row.get('verdict') == 'correct' for row in self.rows)} of {len(self.rows)} right")
        if self.rewards and max(self.rewards) - min(self.rewards) < 1e-9:
            results.append(f"every reward {self.rewards[0]:.3g}: moves no weight")
        elif self.rewards:
            results.append(f"rewards {min(self.rewards):.3g} to {max(self.rewards):.3g}")
        return ", ".join(words) + (f": {', '.join(results)}" if results else "")


def groups(completions: Sequence[Row]) -> Iterator[Group]:
    """Yield neighbouring completions of the same step and group. The only reward of a table is also the sum.

    >>> table = [{"step": 1, "prompt": p, "accuracy": r} for p, r in (("a", 1.0), ("a", 0.0), ("b", 0.0))]
    >>> [(len(group.rows), group.spread) for group in groups(table)]
    [(2, 0.5), (1, 0.0)]
    """
    for (step, _), found in groupby(completions, key=_key):
        rows = list(found)
        names = [name for name in rows[0] if name not in KNOWN and any(is_number(row.get(name)) for row in rows)]
        sums = [row.get("reward", row.get(names[0]) if len(names) == 1 else None) for row in rows]
        yield Group(step, rows, [value for value in sums if is_number(value)])


def _key(row: Row) -> tuple[Any, Any]:
    # A table that TRL alone wrote has no groups.
    return row.get("step"), row.get("group", text_of(row.get("prompt")))


def why(row: Row, text: str, template: str = "") -> str:
    """Return in a sentence why a completion was not paid in full or not counted, or "" if that needs no explanation.

    ``row`` is a row of a training table or of an evaluation.

    >>> why({"verdict": "correct", "in_format": False, "reward": 0.0, "gold": "7"}, "It is 7.", "gsm8k")
    'right, but outside the gsm8k format; it was paid 0'
    >>> why({"verdict": "wrong", "extracted": "3", "gold": "7", "reward": 0.0}, "3 + 4 = 7, so #### 3")
    'the text holds the gold answer 7, but the answer that was read is 3'
    >>> why({"verdict": "correct", "in_format": True, "reward": 1.0, "gold": "7"}, "#### 7")
    ''
    """
    verdict, gold, reward = row.get("verdict"), row.get("gold"), row.get("reward")
    paid = f"; it was paid {reward:.3g}" if is_number(reward) else ""
    if verdict is None:
        return ""
    if verdict in ("crash", "bad_gold"):
        return f"not graded ({verdict}), so that it is left out of its group"
    if verdict == "uncheckable":
        return f"the answer is too large, or takes too long to compute{paid}"
    if verdict == "correct" and row.get("in_format") is False:
        return f"right, but outside the {f'{template} ' * bool(template)}format{paid}"
    if verdict == "correct":
        return "right and in the format, and the rewards gave 0" if reward == 0 else ""
    answer = row.get("extracted", row.get("answer"))
    in_text = gold is not None and re.search(rf"(?<![\d.]){re.escape(str(gold)[:200])}(?![\d])", text)
    if row.get("truncated"):
        return "cut at the length limit before it was done" + (f"; the text holds {gold}" if in_text else "")
    if in_text:
        read = "no answer was read" if answer is None else f"the answer that was read is {answer}"
        return f"the text holds the gold answer {gold}, but {read}"
    return "no answer was found in it" if verdict == "no_answer" else ""


def is_number(value: object) -> bool:
    """Return True for a finite number. pandas, with which TRL writes, makes a missing reward a NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
