r"""A tree -> the rational number that it is, where it is one: standard-library fractions, no floats.

>>> from grpo_math.grading.expression import parse
>>> rational(parse(r"\frac{1}{2} + 0.25")), rational(parse("2^{10}")), rational(parse(r"\sqrt{2}")) is None
(Fraction(3, 4), Fraction(1024, 1), True)

Does not take long: the size of every number is bounded, each operation is charged by the sizes of its operands before
it is done (work.py), and what would go beyond gives None; `certainly_huge` then tells whether its size alone decides.
"""

import math
from collections.abc import Callable
from fractions import Fraction

from grpo_math.grading.expression import Tree
from grpo_math.grading.work import UNITS, charge

MAX_BITS = 60_000
HUGE_BITS = 10 * MAX_BITS
STEP = 3_000  # units for an operation on small fractions


class _Undecided(Exception):
    pass


def rational(tree: Tree) -> Fraction | None:
    """The exact value of a tree, or None where it is no rational number or costs more than one answer may.

    A percent sign divides by 100; degrees stay as they are. `Spent` where the answer has cost too much already.
    """
    if tree[0] == "num":
        return tree[1]
    work = [UNITS]

    def spend(units: float) -> None:
        charge(units)
        work[0] -= int(units)
        if work[0] < 0:
            raise _Undecided

    try:
        return _value(tree, spend)
    except (_Undecided, ZeroDivisionError):
        return None


Spend = Callable[[float], None]


def _value(tree: Tree, spend: Spend) -> Fraction:
    kind = tree[0]
    if kind == "num":
        return tree[1]
    if kind in ("add", "mul", "div"):
        total = _value(tree[1], spend)
        for part in tree[2:]:
            operand = _value(part, spend)
            spend(STEP + 3 * _size(total) * _size(operand))  # Fraction divides by three common divisors at most
            total = total + operand if kind == "add" else total * operand if kind == "mul" else total / operand
            _check(total)
        return total
    if kind == "neg":
        return -_value(tree[1], spend)
    if kind == "pow":
        return _power(_value(tree[1], spend), _value(tree[2], spend), spend)
    if kind == "percent":
        return _value(("div", tree[1], ("num", Fraction(100))), spend)
    if kind == "degrees":
        return _value(tree[1], spend)
    if kind == "fact":
        n = _value(tree[1], spend)
        if n.denominator != 1 or not 0 <= n <= 5000:
            raise _Undecided
        spend(STEP + (math.lgamma(n + 1) / 30) ** 2)
        return _check(Fraction(math.factorial(int(n))))
    if kind == "call":
        return _call(tree[1], [_value(argument, spend) for argument in tree[2:]], spend)
    raise _Undecided


def _digits(n: int) -> int:
    """Of 30 bits each, as Python keeps a number."""
    return n.bit_length() // 30 + 1


def _size(value: Fraction) -> int:
    return _digits(value.numerator) + _digits(value.denominator)


def _check(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise _Undecided
    return value


def _power(base: Fraction, exponent: Fraction, spend: Spend) -> Fraction:
    if exponent.denominator != 1:
        root = _root(base, exponent.denominator, spend)
        if root is None:
            raise _Undecided
        base, exponent = root, Fraction(exponent.numerator)
    if base in (0, 1) and exponent > 0:
        return base
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * bits > MAX_BITS:
        raise _Undecided
    spend(STEP + (abs(int(exponent)) * bits / 30) ** 2)
    return _check(base ** int(exponent))


def _root(base: Fraction, degree: int, spend: Spend) -> Fraction | None:
    """The exact root of a number that has one."""
    if base < 0 or degree > 64:
        return None
    parts = []
    for n in (base.numerator, base.denominator):
        spend(10 * STEP + 2 * _digits(n) ** 2)
        root = math.isqrt(n) if degree == 2 else _integer_root(n, degree)
        if root**degree != n:
            return None
        parts.append(root)
    return Fraction(*parts)


def _integer_root(n: int, degree: int) -> int:
    """The largest integer whose power is at most n: Newton's iteration, which starts from the root of n's first half.

    >>> _integer_root(10**300, 3) == 10**100, _integer_root(10**300 - 1, 3) == 10**100 - 1, _integer_root(63, 6)
    (True, True, 1)
    """
    if n < 2:
        return n
    half = n.bit_length() // (2 * degree)
    root = 1 << (n.bit_length() // degree + 1) if half < 4 else (_integer_root(n >> half * degree, degree) + 1) << half
    while True:  # from above, so that the first that does not fall is the root
        lower = ((degree - 1) * root + n // root ** (degree - 1)) // degree
        if lower >= root:
            return root
        root = lower


def _call(name: str, values: list[Fraction], spend: Spend) -> Fraction:
    sizes = [_size(value) for value in values]
    spend(STEP + 3 * max(sizes, default=0) * sum(sizes))
    if name == "sqrt" and len(values) == 1:
        return _power(values[0], Fraction(1, 2), spend)
    if name == "abs" and len(values) == 1:
        return abs(values[0])
    if name in ("floor", "ceil") and len(values) == 1:
        return Fraction(math.floor(values[0]) if name == "floor" else math.ceil(values[0]))
    if name in ("max", "min") and values:
        return max(values) if name == "max" else min(values)
    integers = [int(v) for v in values if v.denominator == 1]
    if len(integers) != len(values) or not integers:
        raise _Undecided
    if name == "gcd":
        return Fraction(math.gcd(*integers))
    if name == "lcm":
        return Fraction(_lcm(integers, spend))
    if name in ("binom", "perm") and len(integers) == 2 and min(integers) >= 0 and integers[0] <= 5000:
        n, k = integers
        spend(STEP + n * min(k, n) / 8 + (min(k, n) * n.bit_length() / 30) ** 2 / 2)
        return _check(Fraction((math.comb if name == "binom" else math.perm)(n, k)))
    raise _Undecided


def _lcm(integers: list[int], spend: Spend) -> int:
    total = 1
    for n in integers:
        spend(STEP + 3 * _digits(total) * _digits(n))
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
    return _bits_at_least(tree[1] if tree[0] == "neg" else tree) > HUGE_BITS


def _bits_at_least(tree: Tree) -> float:
    """A lower bound of log2(x) for a tower of positive integers; minus infinity for any other tree."""
    kind = tree[0]
    if kind == "num":
        return math.log2(tree[1].numerator) if tree[1] > 0 and tree[1].denominator == 1 else -math.inf
    if kind not in ("pow", "fact", "mul", "add"):
        return -math.inf
    parts = [_bits_at_least(part) for part in tree[1:]]
    if -math.inf in parts:
        return -math.inf
    if kind in ("mul", "add"):
        return sum(parts) if kind == "mul" else max(parts)
    if kind == "pow":
        return parts[0] * min(2.0 ** min(parts[1], 1000.0), 1e300)
    low = parts[0]  # x! >= (x/e)^x, and x! >= x
    return min(2.0 ** min(low, 1000.0), 1e300) * max(low - 1.5, 1.0) if low > 2 else low
