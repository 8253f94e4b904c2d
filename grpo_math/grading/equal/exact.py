r"""The exact rational number of a tree, if the tree is one: standard-library fractions, no floats.

>>> from grpo_math.grading.equal.expression import parse
>>> rational(parse(r"\frac{1}{2} + 0.25")), rational(parse("2^{10}")), rational(parse(r"\sqrt{2}")) is None
(Fraction(3, 4), Fraction(1024, 1), True)

Does not take long: a number of more than 4,000 bits gives None before it is computed. Functions other than the root of
a square give None too; a worker compares them by their values (numeric.py).
"""

import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction

from grpo_math.grading.equal.tree import (
    Call,
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
)

BITS = 4_000  # of a number that is computed


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
