"""Graded completions -> the metrics of an evaluation: categories, accuracy with its interval, pass@k, and their table.

``accuracy`` is the share of right answers in any form, as in the log of a training run; pass@k, maj@k and the parts
count in the same way. ``accuracy_in_format`` is the share of answers that are right and in the requested format.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from grpo_math.errors import escaped
from grpo_math.evaluation.stats import maj_at_k, pass_at_k, wilson_for_means
from grpo_math.evaluation.suite import aligned
from grpo_math.grading import Grade, Verdict
from grpo_math.grading.equal.compare import value as exact_value
from grpo_math.run.metrics import ACCURACY, ACCURACY_IN_FORMAT, CATEGORIES, IN_FORMAT, RIGHT

PARTS = ("subject", "level")
TOLERANCE = "tolerance"
CALLS = ("calls", "failures", "timeouts")  # counted for each completion with tools
Record = dict[str, Any]
Results = dict[str, Any]


def as_published(grade: Grade, gold: Any, row: Mapping[str, Any]) -> Grade:
    """Return the grade, or `Verdict.CORRECT` for a rational number that the authors of the data set accept.

    OlympiadBench accepts a number within 1e-8 of the gold answer, or within the error that the problem states (its
    evaluation code). Minerva accepts a relative error of 1e-5 (arXiv 2206.14858, appendix). The rows of these sets have
    a tolerance (problems/sources.py). Training does not use it: there a number has to equal the gold answer.

    >>> near = Grade(Verdict.WRONG, "0.33333")
    >>> as_published(near, "1/3", {"tolerance": 1e-5}).verdict.value, as_published(near, "1/3", {}).verdict.value
    ('correct', 'wrong')
    """
    if grade.verdict is not Verdict.WRONG or row.get(TOLERANCE) is None:
        return grade
    expected, number = exact_value(str(gold)), exact_value(grade.answer or "")
    # These are exact fractions, so rounding cannot move an answer across the limit.
    if expected is None or number is None or abs(expected - number) > row[TOLERANCE]:
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


def summary(records: Sequence[Record], samples: int = 1) -> dict[str, Any]:
    """Return the summary metrics of graded records. Each problem has ``samples`` consecutive records.

    ``ci95`` is `wilson_for_means`. pass@k and maj@k are exact; k is each power of 2 up to ``samples``, and ``samples``.
    ``by_subject`` and ``by_level`` exist if the problems have them.

    >>> rows = [{"id": "a", "category": "correct_answer_bad_format", "answer": "7"},
    ...         {"id": "b", "category": "bad_format", "answer": None}]
    >>> metrics = summary(rows)
    >>> metrics["n"], metrics["accuracy"], metrics["accuracy_in_format"], metrics["pass@k"]
    (2, 0.5, 0.0, {'1': 0.5})
    """
    problems = [records[i : i + samples] for i in range(0, len(records), samples)]
    right = [[record["category"] in RIGHT for record in problem] for problem in problems]
    means = [fmean(flags) for flags in right]
    # All k up to 32 would make a long table.
    ks = sorted({2**i for i in range(samples.bit_length())} | {samples})
    at_k: dict[str, dict[str, list[float]]] = {"pass@k": {}, "maj@k": {}}  # the value of each problem
    for k in ks:
        at_k["pass@k"][str(k)] = [pass_at_k(samples, sum(flags), k) for flags in right]
        at_k["maj@k"][str(k)] = [
            maj_at_k([record.get("answer") for record in problem], flags, k)
            for problem, flags in zip(problems, right, strict=True)
        ]
    counts = Counter(record["category"] for record in records)
    return {
        "n": len(problems),
        ACCURACY: fmean(means),
        "ci95": _interval(means, samples),
        ACCURACY_IN_FORMAT: sum(record["category"] in IN_FORMAT for record in records) / len(records),
        "mean@n": {"n": samples, "mean": fmean(means), "ci95": _interval(means, samples)},
        "categories": {name: counts[name] for name in CATEGORIES},
        **{name: {k: fmean(values) for k, values in by_k.items()} for name, by_k in at_k.items()},
        **{
            f"{name}_ci95": {k: _interval(values, samples) for k, values in by_k.items()} for name, by_k in at_k.items()
        },
        **{f"by_{name}": _by(name, problems, means) for name in PARTS if any(name in record for record in records)},
    }


def _interval(values: Sequence[float], samples: int) -> list[float]:
    return list(wilson_for_means(values, samples * len(values)))


def _by(name: str, problems: Sequence[Sequence[Record]], means: Sequence[float]) -> dict[str, Any]:
    parts: dict[str, list[float]] = {}
    for problem, mean in zip(problems, means, strict=True):
        value = problem[0].get(name)
        parts.setdefault("none" if value is None else str(value), []).append(mean)
    return {
        part: {"n": len(values), "accuracy": fmean(values), "ci95": _interval(values, len(problems[0]))}
        for part, values in sorted(parts.items())
    }


def metrics_table(results: Results) -> str:
    """Return the metrics as a compact table for the terminal. A category that does not occur has no row.

    >>> rows = [{"id": "a", "category": "correct", "answer": "7", "level": 1}]
    >>> print(metrics_table({"temperature": 0.0, "samples": 1, **summary(rows)}))
    1 problem, greedy
                            n   share     95% interval
    accuracy                1  100.0%  20.7% to 100.0%
    accuracy in format      1  100.0%
    <BLANKLINE>
    correct, in the format  1  100.0%
    level 1                 1  100.0%  20.7% to 100.0%
    """
    n, samples, counts = results["n"], results["samples"], results["categories"]
    drawn = f"{samples} samples each at temperature {results['temperature']:g}" if results["temperature"] else "greedy"
    # pass@1 equals the accuracy, and maj@1 nearly does.
    at_k = [(f"{name}@{k}", name, k) for name in ("pass", "maj") for k in results[f"{name}@k"] if k != "1"]
    parts = [
        (escaped(f"{name} {part}" if name == "level" else part), part_metrics)
        for name in PARTS
        for part, part_metrics in results.get(f"by_{name}", {}).items()
    ]
    rows = [
        ["", "n", "share", "95% interval"],
        ["accuracy", str(n), f"{results['accuracy']:.1%}", _range(results["ci95"])],
        ["accuracy in format", str(n), f"{results['accuracy_in_format']:.1%}", ""],
        *(
            [label, str(n), f"{results[f'{name}@k'][k]:.1%}", _range(results[f"{name}@k_ci95"][k])]
            for label, name, k in at_k
        ),
        [""] * 4,
        *(
            [label, str(counts[name]), f"{counts[name] / (n * samples):.1%}", ""]
            for name, label in CATEGORIES.items()
            if counts[name]
        ),
        *(
            [label, str(part_metrics["n"]), f"{part_metrics['accuracy']:.1%}", _range(part_metrics["ci95"])]
            for label, part_metrics in parts
        ),
    ]
    return f"{n} problem{'' if n == 1 else 's'}, {drawn}\n{aligned(rows)}"


def _range(interval: Sequence[float]) -> str:
    return f"{interval[0]:.1%} to {interval[1]:.1%}"
