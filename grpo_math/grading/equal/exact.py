r"""The exact rational number of a tree, if the tree is one, and the decimals that round it: fractions, no floats.

>>> from grpo_math.grading.equal.expression import parse
>>> rational(parse(r"\frac{1}{2} + 0.25")), rational(parse("2^{10}")), rational(parse(r"\sqrt{2}")) is None
(Fraction(3, 4), Fraction(1024, 1), True)
>>> stands_for(Fraction("0.333333333333"), Fraction(1, 3), 12), stands_for(Fraction("0.333"), Fraction(1, 3), 12)
(True, False)

Does not take long: a number of more than 4,000 bits gives None before it is computed. Functions other than the root of
a square give None too; a worker compares them by their values (numeric.py).
"""

import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from grpo_math.grading.equal.tree import (
    Call,
    Constant,
    Degrees,
    Negative,
    Number,
    Percent,
    Power,
    Product,
    Quotient,
    Residue,
    Sum,
    Tree,
    contains,
    has_names,
    walk,
)  # fmt: skip
from grpo_math.grading.verdict import POLICY

BITS = 4_000  # of a number that is computed
MAX_DIGITS = 60  # significant digits of a decimal that can equal the number it is rounded from


def rational(tree: Tree) -> Fraction | None:
    """Return the exact value of a tree. None if it is not a rational number, or a result has more than `BITS` bits.

    A percent sign divides by 100; a degree sign is ignored.
    """
    try:
        return _value(tree)
    except ArithmeticError:
        return None


def _value(tree: Tree) -> Fraction:
    match tree:
        case Number(value):
            return value
        case Sum(parts):
            return _folded(operator.add, parts)
        case Product(parts):
            return _folded(operator.mul, parts)
        case Quotient(above, below):
            return _folded(operator.truediv, (above, below))
        case Negative(operand):
            return -_value(operand)
        case Degrees(operand):
            return _value(operand)
        case Percent(operand):
            return _value(operand) / 100
        case Residue(number, modulus):
            return _value(number) % _value(modulus)
        case Power(base, exponent):
            return _power(_value(base), _value(exponent))
        case Call((square,), "sqrt"):
            return _root(_value(square))
    raise ArithmeticError


def _folded(operation: Callable[[Fraction, Fraction], Fraction], parts: Sequence[Tree]) -> Fraction:
    total = _value(parts[0])
    for part in parts[1:]:
        total = operation(total, _value(part))
        if total.numerator.bit_length() + total.denominator.bit_length() > BITS:
            raise ArithmeticError
    return total


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or abs(exponent) * bits > BITS:
        raise ArithmeticError
    return base ** int(exponent)


def _root(square: Fraction) -> Fraction:
    """Return the root of the square of a rational number."""
    root = Fraction(math.isqrt(abs(square.numerator)), math.isqrt(square.denominator))
    if root * root != square:
        raise ArithmeticError
    return root


# Decimals and the numbers that they round


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
