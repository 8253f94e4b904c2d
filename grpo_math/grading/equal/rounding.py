r"""Compare decimals with the exact numbers that they round: long decimals, and rounded gold answers.

>>> stands_for(Fraction("0.333333333333"), Fraction(1, 3), 12), stands_for(Fraction("0.333"), Fraction(1, 3), 12)
(True, False)
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from grpo_math.grading.equal.exact import rational
from grpo_math.grading.equal.tree import Call, Constant, Number, Power, Quotient, Tree, contains, has_names, walk
from grpo_math.grading.verdict import POLICY

MAX_DIGITS = 60  # significant digits of a decimal that can equal the number it is rounded from


def places(decimal: Fraction, digits: int = POLICY.digits) -> int | None:
    """Return the decimal places of a decimal with at least ``digits`` significant digits, else None.

    >>> places(Fraction("0.333333333333")), places(Fraction("0.333")), places(Fraction(1, 3))
    (12, None, None)
    """
    if not digits or decimal.denominator == 1 or decimal.denominator.bit_length() > 4 * MAX_DIGITS:
        return None
    bits = decimal.denominator.bit_length()
    at = next((at for at in range(bits) if 10**at % decimal.denominator == 0), None)
    return at if at is not None and len(str(abs(decimal.numerator) * 10**at // decimal.denominator)) >= digits else None


def stands_for(decimal: Fraction, exact: Fraction, digits: int) -> bool:
    """Return True if a decimal with at least ``digits`` significant digits is ``exact``, rounded or truncated."""
    at = places(decimal, digits)
    return at is not None and is_rounded_or_cut(decimal, exact, at)


def is_rounded_or_cut(decimal: Any, exact: Any, at: int) -> bool:
    """Return True if a decimal with ``at`` places is a number, rounded or truncated there.

    >>> [is_rounded_or_cut(Fraction(text), Fraction(2, 3), 2) for text in ("0.66", "0.67", "0.65", "0.68")]
    [True, True, False, False]
    """
    missing = (exact - decimal) * 10**at * (1 if exact > 0 else -1)
    return bool(-1 <= 2 * missing < 2)


def is_rounded(gold: Tree, answer: Tree, number: Callable[[Tree], Any]) -> bool:
    """Return True if a decimal gold answer is a closed form, rounded: 85.71 is 600/7. Half is rounded away from zero.

    The gold answer has at least two places and three significant digits. The expansion of the form does not end.
    """
    if not isinstance(gold, Number):
        return False
    at = places(gold.value, 3)
    if at is None or at < 2 or not contains(answer, Quotient, Call, Power, Constant) or has_names(answer):
        return False
    if any(isinstance(node, Number) and node.value.denominator > 1 for node in walk(answer)):
        return False
    value, exact = number(answer), rational(answer)
    if value is None or (exact is not None and (exact.denominator == 1 or places(exact, 1) is not None)):
        return False
    return bool(abs(value - type(value)(gold.value.numerator) / gold.value.denominator) * 2 * 10**at < 1)
