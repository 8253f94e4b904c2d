"""Score as the authors of a data set do, if they accept more than the gold answer: numbers within a tolerance.

OlympiadBench takes a number within 1e-8 of the gold, or within the error that the problem states (its evaluation code);
Minerva one within a relative 1e-5 (arXiv 2206.14858, appendix). Rows of those sets carry it (problems/sources.py).

Does not hold for training, where a number is right if it is the gold.
"""

from collections.abc import Mapping
from typing import Any

from grpo_math.grading import Grade, Verdict
from grpo_math.grading.equal.compare import value

TOLERANCE = "tolerance"


def as_published(grade: Grade, gold: Any, row: Mapping[str, Any]) -> Grade:
    """Return the grade, or `Verdict.CORRECT` for a rational number that the authors of the data set accept.

    >>> near = Grade(Verdict.WRONG, "0.33333")
    >>> as_published(near, "1/3", {"tolerance": 1e-5}).verdict.value, as_published(near, "1/3", {}).verdict.value
    ('correct', 'wrong')
    """
    if grade.verdict is not Verdict.WRONG or row.get(TOLERANCE) is None:
        return grade
    expected, number = value(str(gold)), value(grade.answer or "")
    if expected is None or number is None or abs(expected - number) > row[TOLERANCE]:
        return grade
    return grade._replace(verdict=Verdict.CORRECT, reason="within the tolerance of the set's authors")
