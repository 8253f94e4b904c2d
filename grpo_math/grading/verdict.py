"""What grading one answer came to: a `Verdict`, and the `Grade` that carries it with its evidence.

>>> str(Verdict.CORRECT), Verdict.TIMEOUT.ungradable, Verdict.WRONG.ungradable
('correct', True, False)

Does not grade, and gives no verdict a number: rewards/ does.
"""

from enum import StrEnum
from typing import NamedTuple


class Verdict(StrEnum):
    """The seven outcomes. The last three are `ungradable`: they say nothing about the answer."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"  # nothing in the completion can be taken for its answer
    UNPARSEABLE = "unparseable"  # there is an answer, and it cannot be read
    BAD_GOLD = "bad_gold"  # the gold is empty or cannot be read
    TIMEOUT = "timeout"  # the time limit, or a guard that saw it coming
    CRASH = "crash"  # the worker died or ran out of memory

    @property
    def ungradable(self) -> bool:
        """True where a reward function must return None instead of a number."""
        return self in (Verdict.BAD_GOLD, Verdict.TIMEOUT, Verdict.CRASH)


class Grade(NamedTuple):
    """One graded completion.

    ``answer`` is the extracted text, cut at 500 characters; ``in_format`` is True where no format was asked for;
    ``seconds`` is the time that this answer itself took; ``reason`` names the rule that decided.

    >>> Grade(Verdict.CORRECT, "72").in_format
    True
    """

    verdict: Verdict
    answer: str | None
    in_format: bool = True
    seconds: float = 0.0
    reason: str = ""
