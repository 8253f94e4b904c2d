r"""Compare two expressions by their values at high precision in a few points. Runs in the worker.

Two constants are equal if their difference shrinks as fast as the precision grows. Expressions with variables are equal
if this is true at each sampled point. The precision covers the digits of the largest term before the decimal point and
of the smallest term after it, so that no term is lost in a sum.

The result "different" is certain if mpmath is correct. The result "equal" is wrong only with negligible probability.

>>> from grpo_math.grading.equal.expression import parse
>>> equal(parse(r"\sqrt{12}"), parse(r"2\sqrt{3}")), equal(parse("(x+1)^2"), parse("x^2+1"))
(<Comparison.EQUAL: 'equal'>, <Comparison.DIFFERENT: 'different'>)

The worker process limits time and memory.
"""

import math
import operator
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, product
from typing import Any

import mpmath
from mpmath import mp

from grpo_math.grading.equal.exact import is_rounded_or_cut, places
from grpo_math.grading.equal.notation import FUNCTIONS
from grpo_math.grading.equal.structure import Rules, exact_leaf
from grpo_math.grading.equal.tree import (
    DIFFERENT,
    EQUAL,
    IMAGINARY,
    ONE,
    UNDECIDED,
    Call,
    Comparison,
    Constant,
    Degrees,
    Factorial,
    Negative,
    Number,
    Percent,
    Power,
    Product,
    Quotient,
    Sum,
    Tree,
    Variable,
    compared,
    has_names,
    walk,
)  # fmt: skip
from grpo_math.grading.equal.tree import names as names_of
from grpo_math.grading.verdict import POLICY

LOW, HIGH = 40, 90  # decimal digits, in addition to those that the largest and the smallest term of a sum need
MOST = 10_000  # of these additional digits
INTEGERS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, -1, -2, -7, 1000, 1009)
INTEGER_NAMES = frozenset("ijklmnN")  # integers, if an expression has a floor or a ceiling
STEPS = frozenset(("floor", "ceil"))
WHOLE = frozenset(("gcd", "lcm", "binom", "perm"))  # functions of integers
MAX_EXPONENT = 10**15


class Overflow(Exception):
    """A power too large to compute even in floating point."""


def equal(gold: Tree, answer: Tree, digits: int = POLICY.digits) -> Comparison:
    """Compare two expressions; undecided if no point gives a value. Raises `Overflow` if a power is too large."""
    exact = exact_leaf(gold, answer, digits)
    if exact is not UNDECIDED:
        return exact
    names = sorted(names_of(gold) | names_of(answer))
    if not names and (_stands_for(gold, answer, digits) or _stands_for(answer, gold, digits)):
        return EQUAL
    # With variables the real points count. Points where a root or a logarithm is not real count if there are no others.
    points = _points(names, gold, answer)
    for real in (
        (True, False) if names and not any(node == IMAGINARY for node in chain(walk(gold), walk(answer))) else (False,)
    ):
        verdicts: set[Comparison] = set()
        for point in points:
            verdicts.add(_equal_at(gold, answer, point, real))
            if DIFFERENT in verdicts:
                return DIFFERENT
        if EQUAL in verdicts:
            return EQUAL
    return UNDECIDED


def _stands_for(decimal: Tree, exact: Tree, digits: int) -> bool:
    """Return True if a decimal with at least ``digits`` significant digits is ``exact``, rounded or truncated."""
    at = places(decimal.value, digits) if isinstance(decimal, Number) else None
    number = None if at is None else _real(exact, at + 20)
    with mp.workdps((at or 0) + 30):
        return number is not None and is_rounded_or_cut(_value(decimal, {}), number, at or 0)


def _real(tree: Tree, precision: int = LOW) -> Any:
    """Return the value of a tree, to 10 digits less than the precision, or None if it is not a real number."""
    try:
        with mp.workdps(precision):
            number = _value(tree, {})
        with mp.workdps(precision - 10):
            return +mpmath.re(number) if mpmath.im(number) == 0 and mpmath.isfinite(number) else None
    except (ArithmeticError, ValueError, TypeError, KeyError):
        return None


def proportional(gold: Tree, answer: Tree, positive: bool) -> Comparison:
    """Return EQUAL if gold = k * answer for one number k that is not 0, or that is positive with ``positive``."""
    names = sorted(names_of(gold) | names_of(answer))
    ratios = []
    with mp.workdps(LOW):
        for point in _points(names, gold, answer):
            with suppress(ArithmeticError, ValueError, TypeError, Overflow):
                ratios.append(_value(gold, point) / _value(answer, point))
        if len(ratios) < 2:
            return UNDECIDED
        same = all(abs(ratio - ratios[0]) <= abs(ratios[0]) * mpmath.mpf(10) ** (10 - LOW) for ratio in ratios[1:])
        return compared(same and (not positive or (mpmath.im(ratios[0]) == 0 and mpmath.re(ratios[0]) > 0)))


def _equal_at(gold: Tree, answer: Tree, point: dict[str, Any], real: bool) -> Comparison:
    try:
        near = _near(gold, answer, point, real)
        if near is not EQUAL:
            return near
        apart = max(_places(gold, point), _places(answer, point))
        if apart > MOST:
            return UNDECIDED
        return near if apart < LOW // 2 else _near(gold, answer, point, real, apart)
    except Overflow:
        if point:  # a large value of a variable
            return UNDECIDED
        raise
    except (ArithmeticError, ValueError, TypeError):
        return UNDECIDED


def _near(gold: Tree, answer: Tree, point: dict[str, Any], real: bool, apart: int = 0) -> Comparison:
    """Return EQUAL if the difference shrinks with the precision. ``apart``: additional digits."""
    gaps = []
    for digits in (LOW + apart, HIGH + apart):
        with mp.workdps(digits):
            p, q = _value(gold, point, real=real), _value(answer, point, real=real)
            if not (mpmath.isfinite(p) and mpmath.isfinite(q)):
                return UNDECIDED
            gaps.append(abs(p - q))
            scale = max(abs(p), abs(q))
    with mp.workdps(HIGH):
        shrinks = gaps[1] <= gaps[0] * mpmath.mpf(10) ** (-(HIGH - LOW) // 2)
        return compared(gaps[1] == 0 or shrinks or (gaps[0] == 0 and gaps[1] <= scale * mpmath.mpf(10) ** (-LOW - 10)))


def _places(tree: Tree, point: dict[str, Any]) -> int:
    """Return the digits before the point of the largest term of a tree's sums, or the zeros after it of the smallest.

    >>> from grpo_math.grading.equal.expression import parse
    >>> _places(parse("2^{2005} + 1"), {}), _places(parse("1 + 10^{-400}"), {}), _places(parse("2^{2005} / 7"), {})
    (604, 1600, 1)
    """
    terms: list[Any] = []
    with mp.workdps(LOW):
        _value(tree, point, terms)
        sizes = [mpmath.mag(term) for term in terms if term != 0 and mpmath.isfinite(term)]
    # 1 - cos(x) is as small as the square of x. Other combinations are as small as its fourth power.
    return int(max((size if size > 0 else -4 * size for size in sizes), default=0) * 0.30103) + 1


def _points(names: list[str], *trees: Tree) -> list[dict[str, Any]]:
    """Return points, each with a value for every name. The values are fixed, distinct and arbitrary.

    A function may have steps and corners: the points have each sign of each variable, and large values. Functions of
    integers get integers.
    """
    nodes = list(chain(*map(walk, trees)))
    calls = {node.name for node in nodes if isinstance(node, Call)}
    whole = bool(calls & WHOLE) or any(
        isinstance(node, Power) and isinstance(node.left, Number) and node.left.value < 0 and has_names(node.right)
        for node in nodes  # such as (-1)^n
    )
    stepped = bool(calls & STEPS) and set(names) <= INTEGER_NAMES
    ones = [0, 0, -1, *(1 << index for index in range(min(len(names), 8)))]  # the names with negative values, as bits
    masks = [*((mask, 1.0) for mask in ones), *product((0, -1), (12.0, 400.0, 90_000.0))] if names else [(0, 1.0)]
    points = [] if whole or stepped else [_point(names, number + 1, *mask) for number, mask in enumerate(masks)]
    if whole or calls & STEPS:
        rows = range(len(INTEGERS))
        points += [
            {n: mpmath.mpf(INTEGERS[(r * (2 * i + 1) + 3 * i) % len(rows)]) for i, n in enumerate(names)} for r in rows
        ]
    return points


def _point(names: list[str], number: int, mask: int, scale: float) -> dict[str, Any]:
    """Return one point. The bits of ``mask`` are the names with negative values."""
    values = {}
    for index, name in enumerate(names):
        fraction = ((index + 1) * 0.6180339887 + number * 0.4142135623) % 1
        values[name] = mpmath.mpf(round((0.35 + 1.9 * fraction) * scale, 6)) * (-1 if mask >> index & 1 else 1)
    return values


def _value(tree: Tree, point: dict[str, Any], terms: list[Any] | None = None, real: bool = False) -> Any:
    """Return the value of a tree. Append the values of terms of sums and arguments of functions to ``terms``.

    With ``real``, raises `ArithmeticError` if the tree or a part of the tree is not real.
    """
    match tree:
        case Number(number):
            return mpmath.mpf(number.numerator) / number.denominator
        case Variable(name):
            return point[name]
        case Constant("inf"):
            raise ArithmeticError("infinity is no value")
        case Constant(name):
            return {"pi": +mp.pi, "e": +mp.e, "i": mpmath.mpc(0, 1)}[name]
    if not isinstance(tree, (Call, Power, *ARITHMETIC)):
        raise ArithmeticError(f"a {type(tree).__name__} has no value")
    values = [_value(part, point, terms, real) for part in tree.children()]
    if terms is not None and (isinstance(tree, Sum) or (isinstance(tree, Call) and tree.name not in ("sqrt", "abs"))):
        terms += values
    if isinstance(tree, Call):
        value = _call(tree.name, values)
    else:
        value = _power(tree, *values) if isinstance(tree, Power) else ARITHMETIC[type(tree)](*values)
    if real and mpmath.im(value) != 0:
        raise ArithmeticError("not real")
    return value


def _factorial(n: Any) -> Any:
    if abs(n) > MAX_EXPONENT:
        raise Overflow
    return mpmath.gamma(n + 1)


ARITHMETIC: dict[type[Tree], Callable[..., Any]] = {
    Sum: lambda *terms: mpmath.fsum(terms), Product: lambda *factors: mpmath.fprod(factors), Negative: operator.neg,
    Quotient: operator.truediv, Percent: lambda x: x / 100, Degrees: lambda x: x * mp.pi / 180, Factorial: _factorial,
}  # fmt: skip


def _power(tree: Tree, base: Any, exponent: Any) -> Any:
    if abs(exponent) > MAX_EXPONENT or (base != 0 and abs(exponent) * abs(mpmath.log(abs(base))) > MAX_EXPONENT):
        raise Overflow
    # The odd root of a negative number is real.
    match tree:
        case Power(_, Quotient(one, Number(root))) if one == ONE and root % 2 == 1 and mpmath.im(base) == 0 > base:
            return -((-base) ** exponent)
    return base**exponent


def _call(name: str, values: list[Any]) -> Any:
    if name == "log":
        return mpmath.log(values[0]) / mpmath.log(values[1] if len(values) > 1 else 10)
    functions = {
        **{name: getattr(mpmath, name.replace("arc", "a"), None) for name in FUNCTIONS},
        "abs": abs, "ln": mpmath.log, "cosec": mpmath.csc, "binom": mpmath.binomial,
        "max": max, "min": min, "gcd": math.gcd, "lcm": math.lcm,
        "perm": lambda n, k: mpmath.gamma(n + 1) / mpmath.gamma(n - k + 1),
    }  # fmt: skip
    if name not in functions:
        raise ArithmeticError(f"{name} has no value")
    if name in ("exp", "sinh", "cosh", "binom", "perm") and any(abs(v) > MAX_EXPONENT for v in values):
        raise Overflow
    if name in ("gcd", "lcm"):
        if any(value != int(value) for value in values):
            raise ArithmeticError(f"{name} of a fraction")
        values = [int(value) for value in values]
    return functions[name](*values)


NUMERIC = Rules(equal, proportional, _real, items=40)
