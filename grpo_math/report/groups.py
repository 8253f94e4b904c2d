"""The completions of a training run, as TRL's table has them -> groups of a problem, each completion with its reasons.

A group is a problem's G completions in one step. What the columns of trainer/table.py do not say, since an earlier
version or TRL alone wrote the table, is left out.

Does not read files (run_dir.py does), nor lay out a page (viewer.py does).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from grpo_math.report.run_dir import text_of

Row = Mapping[str, Any]
OURS = ("problem_id", "gold", "verdict", "extracted", "in_format", "reward", "tokens", "truncated")
TOLD = ("step", "prompt", "completion", "advantage", *OURS)  # what is no reward function's, nor a column of one


class Group(NamedTuple):
    """A problem's completions in one step. ``rewards`` are the sums, where the table has them or can be added up."""

    step: Any
    rows: list[Row]
    rewards: list[float]

    @property
    def spread(self) -> float | None:
        """The standard deviation of the rewards: 0 moves no weight."""
        return pstdev(self.rewards) if self.rewards else None

    @property
    def mean(self) -> float | None:
        return fmean(self.rewards) if self.rewards else None

    @property
    def title(self) -> str:
        """The step, the problem, its gold, and what came of it.

        >>> rows = [{"problem_id": "a", "gold": "7", "verdict": v, "reward": 0.0} for v in ("correct", "wrong")]
        >>> Group(3, rows, [0.0, 0.0]).title
        'step 3, problem a, gold 7: 1 of 2 right, every reward 0: moves no weight'
        """
        words, first = [f"step {self.step}"], self.rows[0]
        words += [f"{name} {first[key]}" for name, key in (("problem", "problem_id"), ("gold", "gold")) if key in first]
        came = []
        if "verdict" in first:
            came.append(f"{sum(row.get('verdict') == 'correct' for row in self.rows)} of {len(self.rows)} right")
        if self.rewards and max(self.rewards) - min(self.rewards) < 1e-9:
            came.append(f"every reward {self.rewards[0]:.3g}: moves no weight")
        elif self.rewards:
            came.append(f"rewards {min(self.rewards):.3g} to {max(self.rewards):.3g}")
        return ", ".join(words) + (f": {', '.join(came)}" if came else "")


def groups(completions: Sequence[Row]) -> Iterator[Group]:
    """Neighbouring completions of the same step and prompt. A table of a single reward has its sum in that column.

    >>> table = [{"step": 1, "prompt": p, "accuracy": r} for p, r in (("a", 1.0), ("a", 0.0), ("b", 0.0))]
    >>> [(len(group.rows), group.spread) for group in groups(table)]
    [(2, 0.5), (1, 0.0)]
    """
    for (step, _), found in groupby(completions, key=lambda row: (row.get("step"), text_of(row.get("prompt")))):
        rows = list(found)
        names = [name for name in rows[0] if name not in TOLD and any(is_number(row.get(name)) for row in rows)]
        sums = [row.get("reward", row.get(names[0]) if len(names) == 1 else None) for row in rows]
        yield Group(step, rows, [value for value in sums if is_number(value)])


def why(row: Row, text: str, template: str = "") -> str:
    """In a sentence, why a completion was not paid in full, or not counted; empty where there is nothing to explain.

    ``row`` is one of a training table or of an evaluation.

    >>> why({"verdict": "correct", "in_format": False, "reward": 0.0, "gold": "7"}, "It is 7.", "gsm8k")
    'right, but outside the gsm8k format; it was paid 0'
    >>> why({"verdict": "wrong", "extracted": "3", "gold": "7", "reward": 0.0}, "3 + 4 = 7, so #### 3")
    'the text holds the gold answer 7, but the answer that was read is 3'
    >>> why({"verdict": "correct", "in_format": True, "reward": 1.0, "gold": "7"}, "#### 7")
    ''
    """
    verdict, gold, reward = row.get("verdict"), row.get("gold"), row.get("reward")
    paid = f"it was paid {reward:.3g}" if is_number(reward) else ""
    if verdict is None:
        return ""
    if verdict in ("timeout", "crash", "bad_gold"):
        return f"not graded ({verdict}), so that it is left out of its group"
    if verdict == "correct":
        if row.get("in_format") is False:
            form = f"the {template} format" if template else "the format"
            return "; ".join(filter(None, (f"right, but outside {form}", paid)))
        return "right and in the format, and the rewards gave 0" if is_number(reward) and reward == 0 else ""
    answer = row.get("extracted", row.get("answer"))
    there = gold is not None and re.search(rf"(?<![\d.]){re.escape(str(gold)[:200])}(?![\d])", text)
    if row.get("truncated"):
        return "cut at the length limit before it was done" + (f"; the text holds {gold}" if there else "")
    if there:
        read = "no answer was read" if answer is None else f"the answer that was read is {answer}"
        return f"the text holds the gold answer {gold}, but {read}"
    return "no answer was found in it" if verdict == "no_answer" else ""


def is_number(value: object) -> bool:
    """A finite number: pandas, with which TRL writes, makes a missing reward a NaN."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and value == value
        and abs(value) != float("inf")
    )
