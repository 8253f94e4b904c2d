"""Graded completions -> the metrics of an evaluation: categories, accuracy with its interval, pass@k.

``accuracy`` is the share of right answers in any form, as in the log of a training run; pass@k, maj@k and the parts
count in the same way. ``accuracy_in_format`` is the share of answers that are right and in the requested format.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any, NamedTuple

from grpo_math.evaluation.stats import maj_at_k, pass_at_k, wilson_for_means
from grpo_math.grading import Grade, Verdict
from grpo_math.grading.equal.compare import value as exact_value
from grpo_math.run import metrics
from grpo_math.run.metrics import CATEGORIES, IN_FORMAT, RIGHT

PARTS = ("subject", "level")
CALLS = ("calls", "failures", "timeouts")


@dataclass(frozen=True, slots=True)
class Record:
    """A graded completion. The fields are the keys of a record in the files, in their order.

    A problem has ``subject``, ``level`` and ``tolerance`` if its data set states them.
    """

    id: Any
    sample: int = 0
    problem: str = ""
    gold: Any = ""
    subject: Any = None
    level: Any = None
    tolerance: float | None = None
    completion: str = ""
    verdict: str = ""
    answer: str | None = None
    in_format: bool | None = None
    category: str = ""
    tokens: int = 0
    truncated: bool = False

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> "Record":
        """Return the record of a row of a file. Version 0.4 has further columns for the calls of tools."""
        return cls(**{name: value for name, value in row.items() if name not in ("turns", *CALLS)})

    @property
    def key(self) -> tuple[str, int]:
        return str(self.id), self.sample

    @property
    def right(self) -> bool:
        return self.category in RIGHT

    @property
    def cut(self) -> bool:
        """True if the length limit has cut the completion, also if its answer is right."""
        return self.truncated or self.category == "truncated"

    def to_dict(self) -> dict[str, Any]:
        """Return the record as the files have it, without the fields that its problem or completion does not have.

        >>> list(Record("a", level=1, category="correct").to_dict())[:5]
        ['id', 'sample', 'problem', 'gold', 'level']
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None or name in ("answer", "in_format")}


class Share(NamedTuple):
    """A share of ``n`` problems, with its 95% interval."""

    value: float
    ci95: Sequence[float]
    n: int


@dataclass(frozen=True)
class Summary:
    """The metrics of an evaluation. ``parts``: the accuracy of each subject and of each level."""

    accuracy: Share
    accuracy_in_format: float
    categories: Mapping[str, int]
    pass_at_k: Mapping[int, Share]
    maj_at_k: Mapping[int, Share]
    parts: Mapping[str, Mapping[str, Share]]

    @property
    def n(self) -> int:
        return self.accuracy.n

    def logged(self) -> dict[str, float]:
        """Return the metrics of the default held-out set, as a history has them."""
        return {
            metrics.HELDOUT_ACCURACY: self.accuracy.value,
            metrics.HELDOUT_IN_FORMAT: self.accuracy_in_format,
            metrics.HELDOUT_N: self.n,
        }


def summarize(records: Sequence[Record], samples: int = 1) -> Summary:
    """Return the summary of graded records. Each problem has ``samples`` consecutive records.

    An interval is `wilson_for_means`. pass@k and maj@k are exact; k is each power of 2 up to ``samples``, and
    ``samples``.

    >>> summary = summarize([Record("a", category="correct_answer_bad_format"), Record("b", category="bad_format")])
    >>> summary.n, summary.accuracy.value, summary.accuracy_in_format, summary.pass_at_k[1].value
    (2, 0.5, 0.0, 0.5)
    """
    problems = [records[i : i + samples] for i in range(0, len(records), samples)]
    right = [[record.right for record in problem] for problem in problems]
    answers = [[record.answer for record in problem] for problem in problems]
    # All k up to 32 would make a long table.
    ks = sorted({2**i for i in range(samples.bit_length())} | {samples})
    counts = Counter(record.category for record in records)

    def share(values: Iterable[float]) -> Share:
        of_problems = [*values]
        return Share(fmean(of_problems), [*wilson_for_means(of_problems, samples * len(of_problems))], len(of_problems))

    parts: dict[str, dict[str, list[float]]] = {}
    for name in PARTS:
        if any(getattr(record, name) is not None for record in records):
            of_part = parts.setdefault(name, {})
            for problem, flags in zip(problems, right, strict=True):
                value = getattr(problem[0], name)
                of_part.setdefault("none" if value is None else str(value), []).append(fmean(flags))
    return Summary(
        accuracy=share(map(fmean, right)),
        accuracy_in_format=sum(record.category in IN_FORMAT for record in records) / len(records),
        categories={name: counts[name] for name in CATEGORIES},
        pass_at_k={k: share(pass_at_k(samples, sum(flags), k) for flags in right) for k in ks},
        maj_at_k={k: share(maj_at_k(*both, k) for both in zip(answers, right, strict=True)) for k in ks},
        parts={name: {part: share(means) for part, means in sorted(by.items())} for name, by in parts.items()},
    )


def as_published(grade: Grade, gold: Any, tolerance: float | None) -> Grade:
    """Return the grade, or `Verdict.CORRECT` for a rational number that the authors of the data set accept.

    OlympiadBench accepts a number within 1e-8 of the gold answer, or within the error that the problem states (its
    evaluation code). Minerva accepts a relative error of 1e-5 (arXiv 2206.14858, appendix). The rows of these sets have
    a tolerance (problems/sources.py). Training does not use it: there a number has to equal the gold answer.

    >>> near = Grade(Verdict.WRONG, "0.33333")
    >>> as_published(near, "1/3", 1e-5).verdict.value, as_published(near, "1/3", None).verdict.value
    ('correct', 'wrong')
    """
    if grade.verdict is not Verdict.WRONG or tolerance is None:
        return grade
    expected, number = exact_value(str(gold)), exact_value(grade.answer or "")
    # These are exact fractions, so rounding cannot move an answer across the limit.
    if expected is None or number is None or abs(expected - number) > tolerance:
        return grade
    return grade._replace(verdict=Verdict.CORRECT, reason="within the tolerance of the set's authors")


def category(grade: Grade, truncated: bool) -> str:
    """Return the category of a completion, from `CATEGORIES`.

    >>> category(Grade(Verdict.CORRECT, "7", in_format=False), truncated=True)
    'correct_answer_bad_format'
    >>> [category(Grade(Verdict.WRONG, "8", in_format), cut) for in_format, cut in ((1, 1), (1, 0), (0, 0))]
    ['truncated', 'wrong_answer', 'bad_format']
    >>> category(Grade(Verdict.BAD_GOLD, "7"), truncated=True), category(Grade(Verdict.CORRECT, "7"), truncated=True)
    ('ungradable', 'correct')
    """
    if grade.verdict.ungradable:
        return "ungradable"
    if grade.verdict is Verdict.CORRECT:
        return "correct" if grade.in_format else "correct_answer_bad_format"
    if truncated:
        return "truncated"
    return "wrong_answer" if grade.in_format else "bad_format"
