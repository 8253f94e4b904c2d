"""Many completions -> their grades, in order, with each distinct one graded once.

Does not compare: compare.py does in this process, and the pool's workers do where it cannot tell.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from grpo_math.errors import one_of
from grpo_math.grading.compare import compare, holds_several
from grpo_math.grading.extract import Extraction, extract, extract_gold
from grpo_math.grading.formats import FORMATS, in_format
from grpo_math.grading.house import HOUSE, House
from grpo_math.grading.pool import Job, Progress, shared_pool
from grpo_math.grading.verdict import Grade, Verdict
from grpo_math.grading.work import bounded

ANSWER_CHARACTERS = 500  # of the answer that a Grade keeps

Row = tuple[str, str, str | None]  # gold, completion, answer format


def grade(
    gold: str, completion: str, *, answer_format: str | None = None, timeout: float = 5.0, house: House = HOUSE
) -> Verdict:
    r"""Is the completion's answer the gold answer?

    ``gold`` is a bare answer or a whole solution that marks one (``#### 72``, ``\boxed{72}``); ``house`` what a grader
    may decide either way (`House`).

    >>> str(grade("x=5", r"\boxed{5}")), str(grade("5", "I do not know."))
    ('correct', 'no_answer')
    """
    return grade_batch([gold], [completion], answer_format=answer_format, timeout=timeout, house=house)[0].verdict


def grade_batch(
    golds: Sequence[str],
    completions: Sequence[str],
    *,
    answer_format: str | Sequence[str | None] | None = None,
    timeout: float = 5.0,
    workers: int | None = None,
    progress: Progress | None = None,
    house: House = HOUSE,
) -> list[Grade]:
    """The grades of many completions, in order; a (gold, completion, format) that occurs twice is graded once.

    ``answer_format`` is one of formats.FORMATS for all rows, or one for each. ``progress`` is called with the number
    of rows just finished, from the calling thread.

    >>> [str(g.verdict) for g in grade_batch(["1", "1"], ["#### 1", "#### 2"], answer_format="gsm8k")]
    ['correct', 'wrong']
    """
    rows = _rows(golds, completions, answer_format)
    count = Counter(rows)
    tell = progress or (lambda rows: None)
    done, undecided = _quickly(count, tell, house.checked())
    jobs = list(undecided)

    def ended(job: int) -> None:
        tell(sum(count[row] for row in undecided[jobs[job]]))

    for job, o in zip(jobs, shared_pool().run(jobs, timeout, workers, ended) if jobs else [], strict=True):
        for row in undecided[job]:
            done[row] = Grade(o.verdict, job[1][:ANSWER_CHARACTERS], _kept(row[1], row[2]), o.seconds, o.reason)
    return [done[row] for row in rows]


def _rows(
    golds: Sequence[str], completions: Sequence[str], answer_format: str | Sequence[str | None] | None
) -> list[Row]:
    if len(golds) != len(completions):
        raise ValueError(f"{len(golds)} golds and {len(completions)} completions: give one gold for each completion")
    one = answer_format is None or isinstance(answer_format, str)
    formats: list[Any] = [answer_format] * len(golds) if one else list(answer_format)  # type: ignore
    if len(formats) != len(golds):
        raise ValueError(f"{len(formats)} answer formats and {len(golds)} golds: give one format for each row")
    for name in set(formats) - {None}:
        one_of("answer_format", name, tuple(FORMATS))
    texts = ["" if gold is None else str(gold) for gold in golds]  # a data set's golds may be numbers
    return list(zip(texts, completions, formats, strict=True))


def _quickly(count: Counter[Row], tell: Progress, house: House) -> tuple[dict[Row, Grade], dict[Job, list[Row]]]:
    """The rows that this process decides, and the (gold, answer) that it cannot, each with its rows."""
    done: dict[Row, Grade] = {}
    undecided: dict[Job, list[Row]] = {}
    for row in count:
        started = time.perf_counter()
        try:
            quick = _quick(*row, house)
        except Exception as error:  # no known text does this; the batch must survive the unknown one
            reason = f"{type(error).__name__} while reading the answer"
            quick = Grade(Verdict.CRASH, None, _kept(row[1], row[2]), reason=reason)
        if isinstance(quick, Grade):
            done[row] = quick._replace(seconds=time.perf_counter() - started)
            tell(count[row])
        else:
            undecided.setdefault(quick, []).append(row)
    return done, undecided


def offending(grades: Sequence[Grade], golds: Sequence[str], completions: Sequence[str]) -> list[dict[str, str | None]]:
    """The rows that could not be graded, for the run directory.

    >>> offending([Grade(Verdict.TIMEOUT, "9^9^9", reason="stopped after 5 s")], ["1"], ["so 9^9^9"])
    [{'verdict': 'timeout', 'reason': 'stopped after 5 s', 'gold': '1', 'answer': '9^9^9', 'completion': 'so 9^9^9'}]
    """
    return [
        {"verdict": str(g.verdict), "reason": g.reason, "gold": gold, "answer": g.answer, "completion": completion}
        for g, gold, completion in zip(grades, golds, completions, strict=True)
        if g.verdict.ungradable
    ]


def _quick(gold: str, completion: str, answer_format: str | None, house: House = HOUSE) -> Grade | Job:
    """A grade, or the (gold, answer) that only a worker can compare."""
    kept = _kept(completion, answer_format)
    wanted = extract_gold(gold)
    if not wanted.text:
        return Grade(Verdict.BAD_GOLD, None, kept, reason="the gold is empty")
    found = extract(completion, answer_format, last_box=house.last_box)
    if not found.text:
        return Grade(Verdict.NO_ANSWER, None, kept, reason=found.how)
    graded: list[Grade] = []
    undecided: list[Job] = []
    pairs = _pairs(wanted, found)
    with bounded():
        if len(found.boxes) > 1 and all(
            compare(wanted.text, part, house=house)[0] is Verdict.CORRECT for part in found.boxes
        ):
            return Grade(Verdict.CORRECT, found.text[:ANSWER_CHARACTERS], kept, reason="the same in all")
        for gold_text, answer in pairs:
            verdict, reason = compare(gold_text, answer, house=house)
            if verdict is None:
                undecided.append((gold_text, answer, *(house if house != HOUSE else ())))
                continue
            graded.append(Grade(verdict, answer[:ANSWER_CHARACTERS], kept, reason=reason))
            if verdict is Verdict.CORRECT:
                return graded[-1]
    return undecided[0] if undecided else graded[0]


def _pairs(wanted: Extraction, found: Extraction) -> list[Job]:
    """What may be compared: the answers, and where one side gives its parts in several boxes, all of them at once."""
    golds = [wanted.text or ""] + ([", ".join(wanted.boxes)] if len(wanted.boxes) > 1 else [])
    if len(found.boxes) < 2:
        return [(gold, found.text or "") for gold in golds]
    return [(gold, (", " if holds_several(gold) else " or ").join(found.boxes)) for gold in golds]


def _kept(completion: str, answer_format: str | None) -> bool:
    return answer_format is None or in_format(completion, answer_format)
