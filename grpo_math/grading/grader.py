"""Many completions -> their grades, in order. Each distinct completion is graded once.

compare.py compares in this process, and the workers do if compare.py cannot decide.
"""

import time
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from grpo_math.errors import require_choice
from grpo_math.grading.equal.compare import compare
from grpo_math.grading.formats import FORMATS, in_format_for
from grpo_math.grading.verdict import POLICY, Grade, GradingPolicy, Verdict
from grpo_math.grading.where import find, gold_answer, read_for, with_points
from grpo_math.grading.workers import Job, Progress, shared_pool

ANSWER_CHARACTERS = 500  # of the answer in a Grade
TIMEOUT = 5.0  # seconds of CPU time for an answer
ONE = "1"  # a cheap answer: if a gold answer cannot be compared with it, the gold answer is at fault

Row = tuple[str, str, str | None, str]  # gold, completion, answer format, problem


def grade(
    gold: str,
    completion: str,
    *,
    answer_format: str | None = None,
    timeout: float = TIMEOUT,
    policy: GradingPolicy = POLICY,
) -> Verdict:
    r"""Return the verdict on a completion's answer.

    ``gold`` is a bare answer or a whole solution with a marked answer (``#### 72``, ``\boxed{72}``). ``policy`` is the
    `GradingPolicy`.

    >>> str(grade("x=5", r"\boxed{5}")), str(grade("5", "I do not know what to say."))
    ('correct', 'no_answer')
    """
    return grade_batch([gold], [completion], answer_format=answer_format, timeout=timeout, policy=policy)[0].verdict


def score(completion: str, gold: str) -> float:
    """Return 1.0 if the completion's answer is the gold answer, and 0.0 otherwise.

    >>> score("It is 7. #### 7", "7"), score("I cannot tell.", "7")
    (1.0, 0.0)
    """
    return float(grade(gold, completion) is Verdict.CORRECT)


def grade_batch(
    golds: Sequence[str],
    completions: Sequence[str],
    *,
    answer_format: str | Sequence[str | None] | None = None,
    problems: Sequence[Any] | None = None,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
    policy: GradingPolicy = POLICY,
) -> list[Grade]:
    """Return the grades of many completions, in order. A repeated (gold, completion, format, problem) is graded once.

    ``answer_format`` is one of formats.FORMATS for all rows, or one for each. A format of one number allows words of
    ``problems`` behind the number, as in "5 red apples". ``progress`` is called with the number of rows just finished,
    from the calling thread.

    >>> [str(g.verdict) for g in grade_batch(["1", "1"], ["#### 1", "#### 2"], answer_format="gsm8k")]
    ['correct', 'wrong']
    >>> [str(g.verdict) for g in grade_batch([72, None, 0.5], ["72", "72", r"\\frac12"])]  # as JSON has them
    ['correct', 'bad_gold', 'correct']
    """
    rows = _rows(golds, completions, answer_format, problems)
    count = Counter(rows)
    tell = progress or (lambda rows: None)
    done, undecided = _quickly(count, tell, policy.checked())
    jobs = list(undecided)

    def ended(job: int) -> None:
        tell(sum(count[row] for row in undecided[jobs[job]]))

    for job, graded in zip(jobs, shared_pool().run(jobs, timeout, ended) if jobs else [], strict=True):
        blamed = _blamed(job, graded, timeout)
        for row in undecided[job]:
            _, completion, name, problem = row
            kept = name is None or in_format_for(job[0], completion, name, job[1], problem)
            done[row] = blamed._replace(answer=job[1][:ANSWER_CHARACTERS], in_format=kept)
    return [done[row] for row in rows]


def _blamed(job: Job, graded: Grade, timeout: float) -> Grade:
    """Return a grade that blames the gold answer if the gold answer alone cannot be checked."""
    gold, _, *policy = job
    if graded.verdict is Verdict.UNCHECKABLE and _is_uncheckable((gold, ONE, *policy), timeout):
        return graded._replace(verdict=Verdict.BAD_GOLD, reason=f"the gold: {graded.reason}")
    return graded


@lru_cache(maxsize=4096)
def _is_uncheckable(job: Job, timeout: float) -> bool:
    decided = isinstance(compare(*job[:2])[0], Verdict)
    return not decided and shared_pool().run([job], timeout)[0].verdict is Verdict.UNCHECKABLE


def _rows(
    golds: Sequence[str],
    completions: Sequence[str],
    answer_format: str | Sequence[str | None] | None,
    problems: Sequence[Any] | None,
) -> list[Row]:
    if len(golds) != len(completions):
        raise ValueError(f"{len(golds)} golds and {len(completions)} completions: give one gold for each completion")
    one = answer_format is None or isinstance(answer_format, str)
    formats: list[Any] = [answer_format] * len(golds) if one else list(answer_format)  # type: ignore
    for name in set(formats) - {None}:
        require_choice("answer_format", name, tuple(FORMATS))
    # Gold answers of a data set may be numbers.
    columns = golds, [""] * len(golds) if problems is None else problems
    gold_answers, problem_texts = (["" if one is None else str(one) for one in column] for column in columns)
    return list(zip(gold_answers, completions, formats, problem_texts, strict=True))


def _quickly(
    count: Counter[Row], tell: Progress, policy: GradingPolicy
) -> tuple[dict[Row, Grade], dict[Job, list[Row]]]:
    """Return the grades that this process decides, and the undecided (gold, answer) pairs with their rows."""
    done: dict[Row, Grade] = {}
    undecided: dict[Job, list[Row]] = {}
    for row in count:
        started = time.perf_counter()
        try:
            quick = _quick(*row, policy)
        except Exception as error:  # no known text raises; an unknown one must not end the batch
            reason = f"{type(error).__name__} while reading the answer"
            quick = Grade(Verdict.UNCHECKABLE, None, in_format=False, reason=reason)
        if isinstance(quick, Grade):
            done[row] = quick._replace(seconds=time.perf_counter() - started)
            tell(count[row])
        else:
            undecided.setdefault(quick, []).append(row)
    return done, undecided


def _quick(
    gold: str, completion: str, answer_format: str | None, problem: str, policy: GradingPolicy = POLICY
) -> Grade | Job:
    """Return a grade, or the (gold, answer) that only a worker can compare."""
    expected = gold_answer(gold)
    extracted = find(completion, answer_format)
    kept = answer_format is None or in_format_for(expected, completion, answer_format, extracted.text, problem)
    if not expected:
        return Grade(Verdict.BAD_GOLD, None, kept, reason="the gold is empty")
    if not extracted.text:
        return Grade(Verdict.NO_ANSWER, None, kept, reason=extracted.how)
    answer = with_points(expected, read_for(expected, extracted.text), completion)
    verdict, reason = compare(expected, answer, policy=policy)
    if not isinstance(verdict, Verdict):
        return (expected, answer, *(policy if policy != POLICY else ()))
    return Grade(verdict, extracted.text[:ANSWER_CHARACTERS], kept, reason=reason)
