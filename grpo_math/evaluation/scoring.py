"""Accept numbers within a tolerance of the gold answer, if the authors of a data set do.

OlympiadBench accepts a number within 1e-8 of the gold answer, or within the error that the problem states (its
evaluation code). Minerva accepts a relative error of 1e-5 (arXiv 2206.14858, appendix). The rows of these sets have a
tolerance (problems/sources.py).

Does not apply to training, where a number has to equal the gold answer.
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
    # `value` returns exact fractions, so rounding cannot move an answer across the limit.
    if expected is None or number is None or abs(expected - number) > row[TOLERANCE]:
        return grade
    return grade._replace(verdict=Verdict.CORRECT, reason="within the tolerance of the set's authors")
