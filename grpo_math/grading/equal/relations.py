r"""The meaning of relations: ``x = 5`` is the value 5, ``1 < x <= 2`` an interval, ``x < 1 or x > 3`` a union.

A chain of equalities gives all of its members: ``x = 5 = 6`` is not the answer 6.

>>> from grpo_math.grading.equal.expression import parse
>>> stated(parse("x = 2 + 3"))
('x', (('add', ('num', Fraction(2, 1)), ('num', Fraction(3, 1))),))
>>> interval(parse("1 < x <= 2"))
('tuple', '(', ']', ('num', Fraction(1, 1)), ('num', Fraction(2, 1)))

Does not compare.
"""

from collections.abc import Callable, Sequence
from itertools import dropwhile, takewhile
from typing import Any

from grpo_math.grading.equal.expression import INFINITE, Tree, negated

JOINED = ("list", "both", "either")


def has_kind(tree: object, kind: str) -> bool:
    """Return True if the kind occurs anywhere in a tree."""
    return isinstance(tree, tuple) and bool(tree) and (tree[0] == kind or any(has_kind(p, kind) for p in tree[1:]))


def has_names(tree: object) -> bool:
    """Return True if a variable occurs anywhere in a tree."""
    return has_kind(tree, "var")


def names(tree: object) -> set[str]:
    """Return the variables of a tree."""
    if not isinstance(tree, tuple) or not tree:
        return set()
    return {tree[1]} if tree[0] == "var" else set().union(*map(names, tree[1:]))


def loose_names(tree: object) -> bool:
    """Return True if a variable occurs outside of functions. ``sin^2 x + cos^2 x`` has none and can be a number."""
    if not isinstance(tree, tuple) or not tree or tree[0] == "call":
        return False
    return tree[0] == "var" or any(map(loose_names, tree[1:]))


def is_infinite(tree: Tree) -> bool:
    """Return True for plus or minus infinity."""
    return tree in (INFINITE, ("neg", INFINITE))


# ------------------------------------------------------------------------------------------------------- equalities


def sides(tree: Tree) -> list[Tree] | None:
    """Return the members of a chain of equalities, or None for any other tree.

    A number after "is about" is the rounded form of the member before. It is dropped if no member equals it.
    """
    if tree[0] != "relation" or any(sign not in ("=", "~") for sign in tree[2::2]):
        return None
    members, exact, signs = tree[1::2], [tree[1]], (*tree[2::2], "")
    for sign, following, before, member in zip(signs, signs[1:], members, members[1:], strict=False):
        if "=" in (sign, following) or has_names(before) or member[0] != "num":
            exact.append(member)
    return exact


def stated(tree: Tree) -> tuple[str, tuple[Tree, ...]] | None:
    """``x = 2 + 3 = 5`` -> (x, (2 + 3, 5)); ``2 + 3 = 5`` -> ("", (2 + 3, 5)); None for an equation to be solved.

    The name is a variable, a label of geometry, or ``f(x)``. It is the first or the last member.
    """
    chain = sides(tree)
    if chain is None:
        return None
    if len(chain) == 1:
        return "", tuple(chain)
    first, others = chain[0], tuple(chain[1:])
    if first[0] in ("var", "mul") and names(first) & set().union(*map(names, others)):
        return None  # x = 5 = 2x
    if any(has_names(side) and side[0] != "var" and not _is_label(side) for side in dropwhile(has_names, others)):
        return None  # x = 5 = 6k
    if first[0] == "var":
        return first[1], others
    if chain[-1][0] == "var":
        return chain[-1][1], tuple(chain[:-1])
    valued = tuple(side for side in chain if not has_names(side))
    if len(valued) == len(chain):
        return "", valued
    return ("", others) if _is_function(first) and first not in others else None


def values(tree: Tree) -> tuple[Tree, ...] | None:
    """Return the values of a chain of equalities. An answer must agree with each of them.

    ``sin x = 1/2`` and ``x + y = 10`` give their numbers, because a problem may ask for them. ``5x = 6`` is an unsolved
    equation and gives no value.
    """
    assignment = stated(tree)
    if assignment is not None:
        return assignment[1]
    chain = sides(tree)
    if chain is None:
        return None
    valued = tuple(side for side in chain if not has_names(side))
    named = len(list(takewhile(has_names, chain)))  # a + b = r^2/(2r) = r/2 = 997
    worked = [side for side in chain[1:named] if not (_is_label(chain[0]) and names(side) == names(chain[0]))]
    unknown = [side for side in chain if has_names(side) and side not in worked]
    derived = len(set(valued)) > 1  # n(n+1) = 2*3 = 6 has been worked out
    return valued if derived or not any(map(_unsolved, unknown)) else ()


def _unsolved(tree: Tree) -> bool:
    """Return True for ``5x``, ``x + 1`` or ``7AB``: an equation with such a left side is not solved."""
    scaled = tree[0] == "mul" and has_names(tree) and any(part[0] == "num" for part in tree[1:])  # 2 sin x
    if not (scaled or loose_names(tree)) or _is_label(tree) or _is_function(tree):
        return False
    return len(names(tree)) == 1 or has_kind(tree, "matrix") or _has_numbers(tree)


def _has_numbers(tree: Tree) -> bool:
    """Return True if a tree has numbers outside of exponents. A problem may ask for ``a^2 + b^2``, not ``2a + 1``."""
    if tree[0] in ("num", "call", "base"):
        return True
    parts = tree[1:2] if tree[0] == "pow" else tree[1:]
    return any(_has_numbers(part) for part in parts if isinstance(part, tuple))


def _is_label(tree: Tree) -> bool:
    """Return True for a name of geometry, as on the left of ``AB = 4``, ``NO/BO = 2``, ``V_1 : V_2 = 11 : 21``."""
    if tree[0] == "var":
        return tree[1][0].isupper() or "_" in tree[1]
    return tree[0] in ("mul", "div", "ratio") and all(_is_label(part) for part in tree[1:])


def _is_function(tree: Tree) -> bool:
    """Return True for ``f(x)`` or ``P(2)``, which are parsed as products."""
    if tree[0] != "mul" or len(tree) != 3 or tree[1][0] != "var" or tree[1][1][0] not in "fghFGHPpQqSTVA":
        return False
    arguments = tree[2][3:] if tree[2][0] == "tuple" else tree[2:]
    return not any(has_kind(argument, kind) for argument in arguments for kind in ("tuple", "relation", "set"))


# ----------------------------------------------------------------------------------------------------- inequalities


def difference(relation: Tree) -> tuple[Tree, str] | None:
    """``a = b`` -> (a - b, "="); ``a > b`` -> (a - b, "<") with the larger side first; None for a chain."""
    if len(relation) != 4:
        return None
    left, sign, right = relation[1:]
    if sign in (">", ">=", "=", "!="):
        return ("add", left, ("neg", right)), {">": "<", ">=": "<="}.get(sign, str(sign))
    if sign in ("<", "<="):
        return ("add", right, ("neg", left)), str(sign)
    return None


def _is_name(tree: Tree) -> bool:
    """Return True for ``x`` or ``f(x)``."""
    return tree[0] == "var" or (tree[0] == "mul" and len(tree) == 3 and all(part[0] == "var" for part in tree[1:]))


def interval(relation: Tree) -> Tree | None:
    """``1 < x <= 2`` -> the tree of (1, 2]; ``|x| < 3`` -> (-3, 3); None for any other relation."""
    members, signs = list(relation[1::2]), list(relation[2::2])
    if signs[0] in (">", ">="):
        members.reverse()
        signs = [{">": "<", ">=": "<="}.get(sign, "?") for sign in reversed(signs)]
    if any(sign not in ("<", "<=") for sign in signs):
        return None
    opening, closing = "(" if signs[0] == "<" else "[", ")" if signs[-1] == "<" else "]"
    small, large = members[0], members[-1]
    if len(members) == 2:
        if small[0] == "call" and small[1] == "abs" and small[2][0] == "var" and not has_names(large):
            return ("tuple", opening, closing, negated(large), large)
        if small[0] == "var" and not has_names(large):
            return ("tuple", "(", closing, ("neg", INFINITE), large)
        if large[0] == "var" and not has_names(small):
            return ("tuple", opening, ")", small, INFINITE)
    if len(members) == 3 and _is_name(members[1]) and not has_names(small) and not has_names(large):
        return ("tuple", opening, closing, small, large)
    return None


def resolved(tree: Tree) -> Tree:
    """Return the set of a membership, the interval of an inequality, the union of several (or of ``x != 2``)."""
    if tree[0] == "relation":
        if len(tree) == 4 and tree[2] == "!=" and tree[1][0] == "var" and not has_names(tree[3]):
            below, above = ("tuple", "(", ")", ("neg", INFINITE), tree[3]), ("tuple", "(", ")", tree[3], INFINITE)
            return ("union", below, above)
        if (
            len(tree) == 4
            and tree[2] == "in"
            and has_names(tree[1])
            and not any(has_kind(tree[1], kind) for kind in ("relation", "union", "meet", "set", "list"))
            and (tree[1][0] != "tuple" or all(part[0] == "var" for part in tree[1][3:]))
            and tree[3][0] in ("set", "tuple", "union", "meet")
        ):
            return tree[3]
        span = interval(tree)
        return tree if span is None else span
    if tree[0] in JOINED and all(item[0] == "relation" and interval(item) is not None for item in tree[1:]):
        return ("meet" if tree[0] == "both" else "union", *(interval(item) for item in tree[1:]))
    return ("list", *tree[1:]) if tree[0] in JOINED else tree


Number = Callable[[Tree], Any]  # the value of a tree as an object with an order, or None


def as_union(tree: Tree, number: Number) -> list[tuple[Any, bool, Any, bool]] | None:
    """Return a set of real numbers as separate intervals in order: (start, closed, end, closed).

    Return None if the tree is not an interval, union or intersection, or if an end has no value.
    """
    parts = tree[1:] if tree[0] in ("union", "meet") else (tree,)
    spans: list[tuple[Any, bool, Any, bool]] = []
    for part in parts:
        if part[0] == "tuple" and len(part) == 5:
            spans.append((_end(part[3], number), part[1] == "[", _end(part[4], number), part[2] == "]"))
        else:
            return None
    if any(span[0] is None or span[2] is None for span in spans):
        return None
    return _meet(spans) if tree[0] == "meet" else _merged(spans)


def _end(tree: Tree, number: Number) -> Any:
    return float("inf") if tree == INFINITE else float("-inf") if is_infinite(tree) else number(tree)


def _meet(spans: Sequence[tuple[Any, bool, Any, bool]]) -> list[tuple[Any, bool, Any, bool]]:
    start, _, end, _ = max(s[0] for s in spans), 0, min(s[2] for s in spans), 0
    closed = all(s[1] for s in spans if s[0] == start), all(s[3] for s in spans if s[2] == end)
    return _merged([(start, closed[0], end, closed[1])])


def _merged(spans: Sequence[tuple[Any, bool, Any, bool]]) -> list[tuple[Any, bool, Any, bool]]:
    merged: list[tuple[Any, bool, Any, bool]] = []
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
