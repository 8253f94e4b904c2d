r"""The meaning of relations: ``x = 5`` is the value 5, ``1 < x <= 2`` an interval, ``x < 1 or x > 3`` a union.

A chain of equalities gives all of its members: ``x = 5 = 6`` is not the answer 6.

>>> from grpo_math.grading.equal.expression import parse
>>> equation_members(parse("x = 2 + 3")) == ("x", (parse("2 + 3"),))
True
>>> interval(parse("1 < x <= 2")) == parse("(1, 2]")
True
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import reduce
from itertools import chain, dropwhile, product, takewhile
from typing import Any

from grpo_math.grading.equal.exact import places, rational
from grpo_math.grading.equal.tree import (
    INFINITE,
    Based,
    Both,
    Call,
    Either,
    Intersection,
    List,
    Matrix,
    Negative,
    Number,
    Power,
    Product,
    Relation,
    Set,
    Sum,
    Tree,
    Tuple,
    Union,
    Variable,
    contains,
    has_loose_names,
    has_names,
    is_infinite,
    names,
    negated,
    walk,
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------- equalities


ANGLES = frozenset(("sin", "cos", "tan", "cot", "sec", "csc"))  # a problem may ask for sin 2x
MIRRORED = {">": "<", ">=": "<=", "\\supset": "\\subset", "\\supseteq": "\\subseteq"}


def sides(tree: Tree) -> list[Tree] | None:
    """Return the members of a chain of equalities, or None for any other tree.

    A number after "is about" is the rounded form of the member before, and is no member.
    """
    if not isinstance(tree, Relation) or not set(tree.signs) <= {"=", "~"}:
        return None
    exact, signs = [tree.parts[0]], (*tree.signs, "")
    for sign, following, before, member in zip(signs, signs[1:], tree.parts, tree.parts[1:], strict=False):
        if "=" in (sign, following) or has_names(before) or not _may_round(member, before):
            exact.append(member)
    return exact


def _may_round(member: Tree, exact: Tree) -> bool:
    """Return False if a number differs from a rational number by a unit of its last digit: 6 is not about 5."""
    number = rational(exact)
    if not isinstance(member, Number) or number is None:
        return isinstance(member, Number)
    digits = str(member.value)
    unit = Fraction(10) ** (-(places(member.value, 1) or 0) or len(digits) - len(digits.rstrip("0")))
    return abs(number - member.value) < unit


def equation_members(tree: Tree) -> tuple[str, tuple[Tree, ...]] | None:
    """``x = 2 + 3 = 5`` -> (x, (2 + 3, 5)); ``2 + 3 = 5`` -> ("", (2 + 3, 5)); None for an equation to be solved.

    The name is a variable, a label of geometry, or ``f(x)``. It is the first or the last member.
    """
    chain = sides(tree)
    if chain is None:
        return None
    first, others = chain[0], tuple(chain[1:])
    if isinstance(first, Variable | Product) and names(first) & set().union(*map(names, others)):
        return None  # x = 5 = 2x
    if not all(isinstance(side, Variable) for side in dropwhile(has_names, others) if has_names(side)):
        return None  # x = 5 = 6k
    if isinstance(first, Variable):
        return first.name, others
    if isinstance(last := chain[-1], Variable):
        return last.name, tuple(chain[:-1])
    valued = tuple(side for side in chain if not has_names(side))
    if len(valued) == len(chain):
        return "", valued
    return ("", others) if _is_function(first) and first not in others else None


def values(tree: Tree) -> tuple[Tree, ...]:
    """Return the values of a chain of equalities. An answer must agree with each of them.

    ``sin x = 1/2`` and ``x + y = 10`` give their numbers, because a problem may ask for them. ``5x = 6`` is an unsolved
    equation and gives no value.
    """
    assignment = equation_members(tree)
    if assignment is not None:
        return assignment[1]
    chain = sides(tree) or []
    valued = tuple(side for side in chain if not has_names(side))
    named = len(list(takewhile(has_names, chain)))  # a + b = r^2/(2r) = r/2 = 997
    worked = chain[1:named]
    unknown = [side for side in chain if has_names(side) and side not in worked]
    derived = len(set(valued)) > 1  # n(n+1) = 2*3 = 6 has been worked out
    return valued if derived or not any(map(is_unsolved, unknown)) else ()


def is_unsolved(tree: Tree) -> bool:
    r"""Return True for ``5x``, ``x + 1``, ``7AB`` or ``|x - 1|``: an equation with such a left side is not solved.

    A problem may ask for ``|z|``, ``\log_a b`` or ``\sqrt{ab}``. The root of one unknown is always an equation.
    """
    if _is_function(tree):
        return False
    with_number = isinstance(tree, Product | Sum) and any(isinstance(part, Number) for part in tree.parts)
    if (with_number and has_names(tree)) or has_loose_names(tree):
        unknowns = isinstance(tree, Sum) and all(map(has_names, tree.parts))  # a problem may ask for 24x - 14y
        return len(names(tree)) == 1 or contains(tree, Matrix) or (_has_numbers(tree) and not unknowns)
    calls = [node for node in walk(tree) if isinstance(node, Call)] if len(names(tree)) == 1 else []
    return any(call.name == "sqrt" or (call.name not in ANGLES and _has_numbers(*call.parts)) for call in calls)


def _has_numbers(*trees: Tree) -> bool:
    """Return True if trees have numbers outside of exponents. A problem may ask for ``a^2 + b^2``, not ``2a + 1``."""
    return any(
        isinstance(tree, Number | Call | Based)
        or _has_numbers(*((tree.left,) if isinstance(tree, Power) else tree.children()))
        for tree in trees
    )


def _is_function(tree: Tree) -> bool:
    """Return True for ``f(x)`` or ``P(2)``, which are parsed as products."""
    match tree:
        case Product((Variable(name), argument)) if name[0] in "fghFGHPpQqSTVA":
            arguments = argument.parts if isinstance(argument, Tuple) else (argument,)
            return not any(contains(part, Tuple, Relation, Set) for part in arguments)
    return False


# ----------------------------------------------------------------------------------------------------- inequalities


def difference(relation: Tree) -> tuple[Tree, str] | None:
    """``a = b`` -> (b - a, "="); ``a < b`` -> (b - a, "<"); None for a chain."""
    match relation:
        case Relation((left, right), ("<" | "<=" | "=" | "!=" as sign,)):
            return Sum((right, Negative(left))), sign
    return None


def interval(relation: Relation) -> Tree | None:
    """``1 < x <= 2`` -> the tree of (1, 2]; ``|x| < 3`` -> (-3, 3); None for any other relation."""
    members, signs = relation.parts, relation.signs
    if not set(signs) <= {"<", "<="}:
        return None
    opening, closing = "(" if signs[0] == "<" else "[", ")" if signs[-1] == "<" else "]"
    match members:
        case (Call((Variable(),), "abs"), bound) if not has_names(bound):
            return Tuple((negated(bound), bound), opening, closing)
        case (Variable(), large) if not has_names(large):
            return Tuple((Negative(INFINITE), large), "(", closing)
        case (small, Variable()) if not has_names(small):
            return Tuple((small, INFINITE), opening, ")")
        case (small, Variable() | Product((Variable(), Variable())), large):  # x, or f(x)
            return None if has_names(small) or has_names(large) else Tuple((small, large), opening, closing)
    return None


def resolved(tree: Tree) -> Tree:
    """Return the set of a membership, the interval of an inequality, the union of several (or of ``x != 2``)."""
    match tree:
        case Product((scalar, Matrix(cells, widths)) | (Matrix(cells, widths), scalar)) if not contains(scalar, Matrix):
            return Matrix(tuple(Product((scalar, cell)) for cell in cells), widths)
        case Negative(operand) if isinstance(scaled := resolved(operand), Matrix):
            return Matrix(tuple(map(negated, scaled.parts)), scaled.widths)
        case Relation((Variable(), hole), ("!=",)) if not has_names(hole):
            return Union((Tuple((Negative(INFINITE), hole)), Tuple((hole, INFINITE))))
        case Relation((member, Set() | Tuple() | Union() | Intersection() as collection), ("in",)) if _is_member(
            member
        ):
            return collection
        case Relation((Tuple(members), Tuple(given)), ("=",)) if len(members) == len(given):  # (x, y) = (1, 2)
            return List(tuple(Relation(pair, ("=",)) for pair in zip(members, given, strict=True)))
        case Relation((bound, Call((Variable(),), "abs")), ("<" | "<=" as sign,)) if not has_names(bound):  # |x| > 1
            out, inward = ("(", ")") if sign == "<" else ("[", "]")
            below = Tuple((Negative(INFINITE), negated(bound)), "(", inward)
            return Union((below, Tuple((bound, INFINITE), out, ")")))
        case Relation(parts, signs) if set(signs) <= MIRRORED.keys():
            return resolved(Relation(parts[::-1], tuple(MIRRORED[sign] for sign in reversed(signs))))
        case Relation():
            return interval(tree) or tree
        case List(parts) | Both(parts) | Either(parts):
            spans = [resolved(part) for part in parts if isinstance(part, Relation)]
            if len(spans) == len(parts) and any(isinstance(span, Tuple | Union) for span in spans):
                spans = [_point(span) for span in spans]
                if all(isinstance(span, Tuple | Union | Set) for span in spans):
                    subjects = [Variable("".join(sorted(names(part)))) for part in parts]
                    if len(set(subjects)) > 1:  # x > 0, y < 5: pairs of a name and its interval
                        return List(tuple(map(Tuple, zip(subjects, spans, strict=True))))
                    holes = any(part.signs == ("!=",) for part in parts if isinstance(part, Relation))
                    both = isinstance(tree, Both) or (holes and not isinstance(tree, Either))
                    return (Intersection if both else Union)(tuple(spans))
            return List(parts)
    return tree


def _point(tree: Tree) -> Tree:
    """Return the set {4} for ``x = 4``, and any other tree unchanged."""
    match tree:
        case Relation((Variable(), value), ("=",)) if not has_names(value):
            return Set((value,))
    return tree


def _is_member(tree: Tree) -> bool:
    """Return True for what may stand before "in": an expression with a name, or a point of names."""
    named = all(isinstance(part, Variable) for part in tree.parts) if isinstance(tree, Tuple) else has_names(tree)
    return named and not contains(tree, Relation, Union, Intersection, Set, List)


Span = tuple[Any, bool, Any, bool]  # start, closed, end, closed
Value = Callable[[Tree], Any]  # the value of a tree as an object with an order, or None


def as_union(tree: Tree, number: Value) -> list[Span] | None:
    """Return a set of real numbers as separate intervals in order: (start, closed, end, closed).

    Return None if the tree is not an interval, union or intersection, or if an end has no value.
    """
    match tree:
        case Tuple((start, end), opening, closing):
            spans = [(_end(start, number), opening == "[", _end(end, number), closing == "]")]
        case Set(parts):
            spans = [(number(part), True, number(part), True) for part in parts]
        case Union(parts) | Intersection(parts):
            sets = [as_union(part, number) for part in parts]
            known = [spans for spans in sets if spans is not None]
            if len(known) < len(sets):
                return None
            return reduce(_meet, known) if isinstance(tree, Intersection) else _merged(list(chain(*known)))
        case _:
            return None
    return None if any(span[0] is None or span[2] is None for span in spans) else _merged(spans)


def _end(tree: Tree, number: Value) -> Any:
    return float("inf") if tree == INFINITE else float("-inf") if is_infinite(tree) else number(tree)


def _meet(one: Sequence[Span], two: Sequence[Span]) -> list[Span]:
    spans = []
    for (a, a_closed, b, b_closed), (c, c_closed, d, d_closed) in product(one, two):
        start, end = max((a, not a_closed), (c, not c_closed)), min((b, b_closed), (d, d_closed))
        spans.append((start[0], not start[1], end[0], end[1]))
    return _merged(spans)


def _merged(spans: Sequence[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, closed, end, last in sorted(spans, key=lambda s: (s[0], not s[1])):
        if start > end or (start == end and not (closed and last)):
            continue
        if merged and (start < merged[-1][2] or (start == merged[-1][2] and (closed or merged[-1][3]))):
            before = merged.pop()
            reach = max((before[2], before[3]), (end, last))
            merged.append((before[0], before[1], *reach))
        else:
            merged.append((start, closed, end, last))
    return merged
