r"""Select and order problems by difficulty: by the pass rate of the model before training.

.. math:: \text{pass rate} = \frac{\text{completions graded correct}}{\text{completions that could be graded}}

A group has no signal if the model always or never solves the problem. `in_band` keeps the problems between two rates
(DAPO, arXiv 2503.14476, drops rates of 0 and 1), and `easy_to_hard` orders problems.

Does not measure the rates: evaluation/pass_rates.py does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_math.problems.problem import Problem

Key = tuple[str, str]  # problem and answer, so that a corrected problem is measured again
Rates = dict[Key, float | None]  # None: no completion could be graded


def key(row: Mapping[str, Any]) -> Key:
    return row["problem"], row["answer"]


def in_band(rows: Sequence[Problem], rates: Rates, low: float, high: float) -> tuple[list[Problem], str]:
    """Return the rows with ``low <= rate <= high``, and one line that counts the others.

    >>> rows = [{"problem": p, "answer": "1"} for p in "abcd"]
    >>> rates = {("a", "1"): 1.0, ("b", "1"): 0.5, ("c", "1"): 0.0, ("d", "1"): None}
    >>> kept, line = in_band(rows, rates, 0.1, 0.9)
    >>> [row["problem"] for row in kept], line
    (['b'], 'difficulty: 1 of 4 problems has a pass rate from 0.1 to 0.9; 1 too easy, 1 too hard, 1 ungradable')
    """
    values = [rates[key(row)] for row in rows]
    kept = [row for row, rate in zip(rows, values, strict=True) if rate is not None and low <= rate <= high]
    easy = sum(rate is not None and rate > high for rate in values)
    hard = sum(rate is not None and rate < low for rate in values)
    ungradable = f", {values.count(None)} ungradable" if None in values else ""
    return kept, (
        f"difficulty: {len(kept)} of {len(rows)} problems {'has' if len(kept) == 1 else 'have'} a pass rate from "
        f"{low:g} to {high:g}; {easy} too easy, {hard} too hard{ungradable}"
    )


def easy_to_hard(rows: Sequence[Problem], rates: Rates) -> list[Problem]:
    """Return the rows by falling pass rate. Equal rates keep their order, and ungradable rows come last.

    >>> rows = [{"problem": p, "answer": "1"} for p in "abc"]
    >>> [row["problem"] for row in easy_to_hard(rows, {("a", "1"): 0.2, ("b", "1"): None, ("c", "1"): 0.7})]
    ['c', 'a', 'b']
    """
    rate_of = [rates[key(row)] for row in rows]
    order = sorted(range(len(rows)), key=lambda i: -1.0 if (rate := rate_of[i]) is None else rate, reverse=True)
    return [rows[i] for i in order]
