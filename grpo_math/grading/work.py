r"""How much work an answer may cost in the calling process, which nothing kills: operations, counted beforehand.

A unit is about a nanosecond: one product of two 30-bit digits, the unit of Python's own long arithmetic. Whoever is
about to work on an answer charges what it will cost by the sizes of what it holds; past the limit that raises `Spent`,
and the answer goes to a worker, which has a time limit instead.

>>> with bounded(100):
...     charge(60)
...     charge(60)
Traceback (most recent call last):
    ...
grpo_math.grading.work.Spent

Does not measure time: the same answer costs the same on every machine.
"""

import re
from contextvars import ContextVar, Token

UNITS = 10_000_000  # for one answer: all pairs of gold and answer, all their readings
MAX_CHARACTERS = 2_000  # of an answer that is read; golds of GSM8K and MATH have at most 159
CHARACTER = 20_000  # units for reading one character of an answer, in all the ways in which it can be read
NODE = 2_000  # units for comparing one node of a tree
LONG_NUMBER = re.compile(r"[-+]?[\d,]*(?:\.\d*)?")
_left: ContextVar[list[float] | None] = ContextVar("units left", default=None)


class Spent(Exception):
    """The answer would cost more than the calling process may spend on it."""


class bounded:  # a generator as context manager would take four times as long
    """Within it, what is charged is at most ``units``: the list holds what is left. An outer bound holds for an inner.

    >>> with bounded(100) as left, bounded():
    ...     charge(60)
    >>> left
    [40]
    """

    __slots__ = ("token", "units")

    def __init__(self, units: float = UNITS) -> None:
        self.units = units
        self.token: Token[list[float] | None] | None = None

    def __enter__(self) -> list[float]:
        left = _left.get()
        if left is None:
            left = [self.units]
            self.token = _left.set(left)
        return left

    def __exit__(self, *error: object) -> None:
        if self.token is not None:
            _left.reset(self.token)


def charge(units: float) -> None:
    """Count units that are about to be spent; `Spent` where that is too many. Free of charge outside `bounded`."""
    left = _left.get()
    if left is not None:
        left[0] -= units
        if left[0] < 0:
            raise Spent


def shortened(text: str) -> str | None:
    """A text that is short enough to be read: itself, or a long number without its idle zeros; None where it is none.

    >>> shortened("7" * 3000) is None, shortened("0" * 3000 + "42." + "0" * 3000), shortened("x" * 2000) == "x" * 2000
    (True, '42', True)
    """
    if len(text) <= MAX_CHARACTERS:
        return text
    if LONG_NUMBER.fullmatch(text) is None:
        return None
    sign = "-" if text[0] == "-" else ""
    whole, point, decimals = text.lstrip("+-").replace(",", "").partition(".")
    decimals = decimals.rstrip("0")
    text = sign + (whole.lstrip("0") or "0") + (point if decimals else "") + decimals
    return text if len(text) <= MAX_CHARACTERS else None
