r"""The exact rational number of a tree, if the tree is one: standard-library fractions, no floats.

>>> from grpo_math.grading.equal.expression import parse
>>> rational(parse(r"\frac{1}{2} + 0.25")), rational(parse("2^{10}")), rational(parse(r"\sqrt{2}")) is None
(Fraction(3, 4), Fraction(1024, 1), True)

Does not take long: a number of more than 4,000 bits gives None before it is computed. Functions other than the root of
a square give None too; a worker compares them by their values (numeric.py).
"""

import math
from fractions import Fraction

from grpo_math.grading.equal.expression import Tree

BITS = 4_000  # of a number that is computed


class _Undecided(Exception):
    pass


def rational(tree: Tree) -> Fraction | None:
    """Return the exact value of a tree. None if it is not a rational number, or a result has more than `BITS` bits.

    A percent sign divides by 100; a degree sign is ignored.
    """
    try:
        return _value(tree)
    except (_Undecided, ZeroDivisionError):
        return None


def _value(tree: Tree) -> Fraction:
    kind = tree[0]
    if kind == "num":
        return tree[1]
    if kind in ("add", "mul", "div"):
        total = _value(tree[1])
        for part in tree[2:]:
            operand = _value(part)
            total = total + operand if kind == "add" else total * operand if kind == "mul" else total / operand
            if total.numerator.bit_length() + total.denominator.bit_length() > BITS:
                raise _Undecided
        return total
    if kind == "neg":
        return -_value(tree[1])
    if kind == "degrees":
        return _value(tree[1])
    if kind == "percent":
        return _value(tree[1]) / 100
    if kind == "pow":
        return _power(_value(tree[1]), _value(tree[2]))
    if tree[:2] == ("call", "sqrt"):
        return _root(_value(tree[2]))
    raise _Undecided


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or abs(exponent) * bits > BITS:
        raise _Undecided
    return base ** int(exponent)


def _root(square: Fraction) -> Fraction:
    """Return the root of the square of a rational number."""
    if square < 0:
        raise _Undecided
    root = Fraction(math.isqrt(square.numerator), math.isqrt(square.denominator))
    if root * root != square:
        raise _Undecided
    return root
