r"""Completion -> verdict: extract the answer, compare it with the gold, in a way that cannot hang.

`grade` answers for one completion, `grade_batch` for many. Most answers are decided in this process in microseconds
(extract.py, compare.py); the rest go to worker processes that are killed when they overrun (pool.py, worker.py).

>>> str(grade("72", "48 + 24 = 72\n#### 72")), str(grade(r"\frac{1}{2}", "The answer is 0.5."))
('correct', 'correct')

Does not know about rewards, and does not import sympy or Math-Verify in this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from grpo_math.errors import one_of
from grpo_math.grading.compare import compare, holds_several
from grpo_math.grading.extract import Extraction, extract, extract_gold
from grpo_math.grading.formats import FORMATS, in_format
from grpo_math.grading.pool import shared_pool, shutdown
from grpo_math.grading.verdict import Grade, Verdict

__all__ = ["Grade", "Verdict", "grade", "grade_batch", "offending", "shutdown"]

ANSWER_CHARACTERS = 500  # of the answer that a Grade keeps


def grade(gold: str, completion: str, *, answer_format: str | None = None, timeout: float = 5.0) -> Verdict:
    r"""Is the completion's answer the gold answer?

    ``gold`` is a bare answer or a whole solution that marks one (``#### 72``, ``\boxed{72}``).

    >>> str(grade("x=5", r"\boxed{5}")), str(grade("5", "I do not know."))
    ('correct', 'no_answer')
    """
    return grade_batch([gold], [completion], answer_format=answer_format, timeout=timeout)[0].verdict


def grade_batch(
    golds: Sequence[str],
    completions: Sequence[str],
    *,
    answer_format: str | Sequence[str | None] | None = None,
    timeout: float = 5.0,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Grade]:
    """The grades of many completions, in order; a (gold, completion, format) that occurs twice is graded once.

    ``answer_format`` is one of prompts.FORMATS for all rows, or one for each. ``progress`` is called with the number
    of rows just finished, from the calling thread.

    >>> [str(g.verdict) for g in grade_batch(["1", "1"], ["#### 1", "#### 2"], answer_format="gsm8k")]
    ['correct', 'wrong']
    """
    if len(golds) != len(completions):
        raise ValueError(f"{len(golds)} golds and {len(completions)} completions: give one gold a completion")
    many = answer_format is not None and not isinstance(answer_format, str)
    formats: list[str | None] = list(answer_format) if many else [answer_format] * len(golds)  # type: ignore
    if len(formats) != len(golds):
        raise ValueError(f"{len(formats)} answer formats and {len(golds)} golds: give one format a row")
    for name in set(formats) - {None}:
        one_of("answer_format", name, tuple(FORMATS))

    texts = ["" if gold is None else str(gold) for gold in golds]  # a data set's golds may be numbers
    rows = list(zip(texts, completions, formats, strict=True))
    count: dict[tuple[str, str, str | None], int] = {}
    for row in rows:
        count[row] = count.get(row, 0) + 1
    done: dict[tuple[str, str, str | None], Grade] = {}
    open_jobs: dict[tuple[str, str], list[tuple[str, str, str | None]]] = {}
    for row in count:
        started = time.perf_counter()
        try:
            quick = _quick(*row)
        except Exception as error:  # no known text does this; the batch must survive the unknown one
            reason = f"{type(error).__name__} while reading the answer"
            quick = Grade(Verdict.CRASH, None, _kept(row[1], row[2]), reason=reason)
        if isinstance(quick, Grade):
            done[row] = quick._replace(seconds=time.perf_counter() - started)
            if progress is not None:
                progress(count[row])
        else:
            open_jobs.setdefault(quick, []).append(row)
    if open_jobs:
        waiting = list(open_jobs.values())

        def report(job: int) -> None:
            if progress is not None:
                progress(sum(count[row] for row in waiting[job]))

        outcomes = shared_pool().run(list(open_jobs), timeout, workers, report)
        for (_, answer), same, outcome in zip(open_jobs, open_jobs.values(), outcomes, strict=True):
            for row in same:
                done[row] = Grade(
                    outcome.verdict, answer[:ANSWER_CHARACTERS], _kept(row[1], row[2]), outcome.seconds, outcome.reason
                )
    return [done[row] for row in rows]


def offending(grades: Sequence[Grade], golds: Sequence[str], completions: Sequence[str]) -> list[dict[str, str | None]]:
    """The rows that could not be graded, for the run directory.

    >>> offending([Grade(Verdict.TIMEOUT, "9^9^9", reason="stopped after 5 s")], ["1"], ["so 9^9^9"])
    [{'verdict': 'timeout', 'reason': 'stopped after 5 s', 'gold': '1', 'answer': '9^9^9', 'completion': 'so 9^9^9'}]
    """
    return [
        {
            "verdict": str(g.verdict),
            "reason": g.reason,
            "gold": gold,
            "answer": g.answer,
            "completion": completion,
        }
        for g, gold, completion in zip(grades, golds, completions, strict=True)
        if g.verdict.ungradable
    ]


def _quick(gold: str, completion: str, answer_format: str | None) -> Grade | tuple[str, str]:
    """A grade, or the (gold, answer) that only a worker can compare."""
    kept = _kept(completion, answer_format)
    wanted = extract_gold(gold)
    if not wanted.text:
        return Grade(Verdict.BAD_GOLD, None, kept, reason="the gold is empty")
    found = extract(completion, answer_format)
    if not found.text:
        return Grade(Verdict.NO_ANSWER, None, kept, reason=found.how)
    graded: list[Grade] = []
    undecided: list[tuple[str, str]] = []
    for gold_text, answer in _pairs(wanted, found):
        verdict, reason = compare(gold_text, answer)
        if verdict is None:
            undecided.append((gold_text, answer))
            continue
        graded.append(Grade(verdict, answer[:ANSWER_CHARACTERS], kept, reason=reason))
        if verdict is Verdict.CORRECT:
            return graded[-1]
    return undecided[0] if undecided else graded[0]


def _pairs(wanted: Extraction, found: Extraction) -> list[tuple[str, str]]:
    """What may be compared: the last boxes, and where one side gives its parts in several boxes, all of them."""
    golds = [wanted.text or ""] + ([", ".join(wanted.boxes)] if len(wanted.boxes) > 1 else [])
    pairs = [(gold, found.text or "") for gold in golds]
    if len(found.boxes) > 1:
        pairs += [(gold, ", ".join(found.boxes)) for gold in golds if holds_several(gold)]
    return pairs


def _kept(completion: str, answer_format: str | None) -> bool:
    return answer_format is None or in_format(completion, answer_format)
