r"""A tree -> the rational number that it is, where it is one: standard-library fractions, no floats.

>>> from grpo_math.grading.expression import parse
>>> rational(parse(r"\frac{1}{2} + 0.25")), rational(parse("2^{10}")), rational(parse(r"\sqrt{2}")) is None
(Fraction(3, 4), Fraction(1024, 1), True)

Does not take long: the size of every number and the work of the whole tree are bounded, and what would go beyond gives
None; `certainly_huge` then tells whether its size alone decides.
"""

import math
from fractions import Fraction

from grpo_math.grading.expression import Tree

MAX_BITS = 60_000
MAX_WORK = 3_000_000  # bits that all operations on one tree may handle
HUGE_BITS = 10 * MAX_BITS


class _Undecided(Exception):
    pass


def rational(tree: Tree) -> Fraction | None:
    """The exact value of a tree, or None where it is no rational number or too large to compute at once.

    A percent sign divides by 100; degrees stay as they are.
    """
    if tree[0] == "num":
        return tree[1]
    try:
        return _value(tree, [MAX_WORK])
    except (_Undecided, ZeroDivisionError):
        return None


def _value(tree: Tree, work: list[int]) -> Fraction:
    kind = tree[0]
    if kind == "num":
        return tree[1]
    if kind in ("add", "mul"):
        total = _value(tree[1], work)
        for part in tree[2:]:
            operand = _value(part, work)
            total = _sized(total + operand if kind == "add" else total * operand, work)
        return total
    if kind == "neg":
        return -_value(tree[1], work)
    if kind == "div":
        return _sized(_value(tree[1], work) / _value(tree[2], work), work)
    if kind == "pow":
        return _power(_value(tree[1], work), _value(tree[2], work), work)
    if kind == "percent":
        return _value(tree[1], work) / 100
    if kind == "degrees":
        return _value(tree[1], work)
    if kind == "fact":
        n = _value(tree[1], work)
        if n.denominator != 1 or not 0 <= n <= 5000:
            raise _Undecided
        return _sized(Fraction(math.factorial(int(n))), work)
    if kind == "call":
        return _call(tree[1], [_value(argument, work) for argument in tree[2:]], work)
    raise _Undecided


def _sized(value: Fraction, work: list[int]) -> Fraction:
    bits = value.numerator.bit_length() + value.denominator.bit_length()
    work[0] -= bits
    if bits > MAX_BITS or work[0] < 0:
        raise _Undecided
    return value


def _power(base: Fraction, exponent: Fraction, work: list[int]) -> Fraction:
    if exponent.denominator != 1:
        root = _root(base, exponent.denominator)
        if root is None:
            raise _Undecided
        base, exponent = root, Fraction(exponent.numerator)
    if base in (0, 1) and exponent > 0:
        return base
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * bits > MAX_BITS:
        raise _Undecided
    return _sized(base ** int(exponent), work)


def _root(base: Fraction, degree: int) -> Fraction | None:
    """The exact root of a number that has one."""
    if base < 0 or degree > 64:
        return None
    parts = []
    for n in (base.numerator, base.denominator):
        root = math.isqrt(n) if degree == 2 else _integer_root(n, degree)
        if root**degree != n:
            return None
        parts.append(root)
    return Fraction(*parts)


def _integer_root(n: int, degree: int) -> int:
    low, high = 0, 1 << (n.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if middle**degree <= n:
            low = middle
        else:
            high = middle - 1
    return low


def _call(name: str, values: list[Fraction], work: list[int]) -> Fraction:
    if name == "sqrt" and len(values) == 1:
        return _power(values[0], Fraction(1, 2), work)
    if name == "abs" and len(values) == 1:
        return abs(values[0])
    if name in ("floor", "ceil") and len(values) == 1:
        return Fraction(math.floor(values[0]) if name == "floor" else math.ceil(values[0]))
    if name in ("max", "min") and values:
        return max(values) if name == "max" else min(values)
    integers = [int(v) for v in values if v.denominator == 1]
    if len(integers) != len(values) or not integers:
        raise _Undecided
    if name in ("gcd", "lcm"):
        return _sized(Fraction(math.gcd(*integers) if name == "gcd" else _lcm(integers)), work)
    if name in ("binom", "perm") and len(integers) == 2 and min(integers) >= 0 and integers[0] <= 5000:
        return _sized(Fraction((math.comb if name == "binom" else math.perm)(*integers)), work)
    raise _Undecided


def _lcm(integers: list[int]) -> int:
    total = 1
    for n in integers:
        total = math.lcm(total, n)
        if total.bit_length() > MAX_BITS:
            raise _Undecided
    return total


def certainly_huge(tree: Tree) -> bool:
    """Is the tree a tower, factorial, or product that is surely beyond every number that `rational` computes?

    >>> from grpo_math.grading.expression import parse
    >>> certainly_huge(parse("9^{9^{9^9}}")), certainly_huge(parse("9^9")), certainly_huge(parse("0^{9^{9^9}}"))
    (True, False, False)
    """
    return _log2_at_least(tree) > HUGE_BITS


def _log2_at_least(tree: Tree) -> float:
    """A lower bound of log2|x|; minus infinity where nothing is known. Only for towers of positive integers."""
    kind = tree[0]
    nothing = -math.inf
    if kind == "num":
        n = tree[1]
        return math.log2(n.numerator) - math.log2(n.denominator) if n > 0 else nothing
    if kind == "neg":
        return _log2_at_least(tree[1])
    if kind == "fact" and _is_natural(tree[1]):
        low = _log2_at_least(tree[1])  # x! >= (x/e)^x, and x! >= x
        return min(2.0 ** min(low, 1000.0), 1e300) * max(low - 1.5, 1.0) if low > 2 else low
    if kind in ("mul", "add") and all(_is_natural(part) for part in tree[1:]):
        return (sum if kind == "mul" else max)(_log2_at_least(part) for part in tree[1:])
    if kind == "pow" and _is_natural(tree[1]) and _is_natural(tree[2]):
        base, exponent = _log2_at_least(tree[1]), _log2_at_least(tree[2])
        return base * min(2.0 ** min(exponent, 1000.0), 1e300) if base >= 1 and exponent >= 0 else nothing
    return nothing


def _is_natural(tree: Tree) -> bool:
    kind = tree[0]
    if kind == "num":
        return tree[1] > 0 and tree[1].denominator == 1
    return kind in ("pow", "fact", "mul", "add") and all(_is_natural(part) for part in tree[1:])
