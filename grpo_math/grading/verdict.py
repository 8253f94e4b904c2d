"""The result of grading one answer: a `Verdict`, and the `Grade` with the verdict and its evidence.

>>> str(Verdict.CORRECT), Verdict.CRASH.ungradable, Verdict.UNCHECKABLE.ungradable
('correct', True, False)
"""

from enum import StrEnum
from typing import NamedTuple

from grpo_math.errors import ConfigError

# The version of the grader. Results of different versions are not comparable. Verdicts change only because of labelled
# cases, which tests/cases keeps, and each change increases this number.
GRADER = 20


class Verdict(StrEnum):
    """The seven outcomes. The last two are `ungradable`: the gold answer or the machine is at fault, not the answer."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"  # the completion has no answer
    UNPARSEABLE = "unparseable"  # the answer cannot be read
    UNCHECKABLE = "uncheckable"  # the answer is too large, or exceeded the limit of CPU time, or twice that of memory
    BAD_GOLD = "bad_gold"  # the gold answer is empty, too large, or exceeds these limits by itself
    CRASH = "crash"  # two workers were killed from outside

    @property
    def ungradable(self) -> bool:
        """True if a reward function must return None instead of a number."""
        return self in (Verdict.BAD_GOLD, Verdict.CRASH)


class Grade(NamedTuple):
    """One graded completion.

    ``answer`` is the extracted text, cut at 500 characters; ``in_format`` is True if no format was requested;
    ``seconds`` is the time that this answer itself took; ``reason`` names the rule that decided.

    >>> Grade(Verdict.CORRECT, "72").in_format
    True
    """

    verdict: Verdict
    answer: str | None
    in_format: bool = True
    seconds: float = 0.0
    reason: str = ""


class GradingPolicy(NamedTuple):
    """Choices that mathematics leaves open. Training and evaluation use the defaults to stay comparable.

    ``percent_as_number``: 25% equals 25 as well as 0.25. ``digits``: a decimal with at least that many significant
    digits equals the number that it is rounded or truncated from, as 1.41421356237 equals sqrt(2); 0 for never.
    ``rounded_golds``: a gold answer such as 85.71 also accepts 600/7, a closed form that is rounded to it.
    """

    percent_as_number: bool = True
    digits: int = 12
    rounded_golds: bool = False

    def checked(self) -> "GradingPolicy":
        """Return the policy. Raises `ConfigError` if ``digits`` is below 6: inexact answers would be correct."""
        if self.digits and self.digits < 6:
            raise ConfigError("digits", self.digits, "would reward answers that are only near", "give 0, or 6 or more")
        return self


POLICY = GradingPolicy()
