"""The rules of the house: what a grader may decide either way, each with its default.

>>> HOUSE
House(percent_as_number=True, digits=12, last_box=True)

Does not hold what is mathematics: 1/2 is 0.5 under every rule.
"""

from typing import NamedTuple

from grpo_math.errors import ConfigError


class House(NamedTuple):
    """Training and evaluation use the defaults, so that their results compare; `grade` and `grade_batch` take others.

    ``percent_as_number``: 25% answers 25, where the problem asks for a percentage, and not only 0.25.
    ``digits``: a decimal of that many significant digits or more answers the number that it is rounded or cut off
    from, as 1.41421356237 answers sqrt(2); 0 for never.
    ``last_box``: of several boxes in a worked solution the last is the answer; without it, different boxes are several
    answers.
    """

    percent_as_number: bool = True
    digits: int = 12
    last_box: bool = True

    def checked(self) -> "House":
        """Itself; a `ConfigError` where ``digits`` is below 6, where a rounded answer would be paid for a near one."""
        if self.digits and self.digits < 6:
            raise ConfigError("digits", self.digits, "would pay answers that are only near", "give 0, or 6 or more")
        return self


HOUSE = House()
