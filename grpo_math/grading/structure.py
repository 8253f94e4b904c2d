r"""Two trees -> equal, different, or undecided: the structure of answers, with single expressions left to `Rules`.

Lists and sets have no order, tuples have one, intervals have their brackets; ``x = 5`` is 5, ``1 < x <= 2`` is (1, 2],
``a \pm b`` is two values; equations are equal up to a factor. Every function is three-valued: None where the rules
cannot tell. `EXACT` decides rational numbers and equal forms; the rules of numeric.py decide the rest, in the worker.

>>> from grpo_math.grading.expression import parse
>>> equal(parse("1, 2"), parse("2, 1"), EXACT), equal(parse("(1, 2)"), parse("(2, 1)"), EXACT)
(True, False)
>>> equal(parse(r"\sqrt{12}"), parse(r"2\sqrt{3}"), EXACT) is None
True

Does not read texts, and does not know units.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from grpo_math.grading.exact import certainly_huge, rational
from grpo_math.grading.expression import Tree, negated

MAX_ITEMS = 40  # of an unordered list; longer lists are compared in order


class Rules(NamedTuple):
    """How single expressions are compared, and how two left sides of equations are."""

    leaf: Callable[[Tree, Tree], bool | None]
    proportional: Callable[[Tree, Tree, bool], bool | None]


def equal(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    """Are two answers equal? None where `rules` cannot tell."""
    return _equal(expanded(gold), expanded(answer), rules)


def _equal(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    if gold == answer:
        return True
    if gold[0] == answer[0] == "relation":
        one, two = _two_sides(gold), _two_sides(answer)
        if one and two and one[1] == two[1] in ("<", "<=") and rules.proportional(one[0], two[0], True):
            return True
    gold, answer = _resolved(gold), _resolved(answer)
    if gold[0] == "relation" or answer[0] == "relation":
        return _equal_relations(gold, answer, rules)
    return _equal_values(gold, answer, rules)


def _resolved(tree: Tree) -> Tree:
    """A membership is its set, an inequality its interval, several of them (or ``x != 2``) a union."""
    if tree[0] == "relation":
        if len(tree) == 4 and tree[2] == "!=" and tree[1][0] == "var" and not _variables(tree[3]):
            below, above = ("tuple", "(", ")", ("neg", INFINITY), tree[3]), ("tuple", "(", ")", tree[3], INFINITY)
            return ("union", below, above)
        if len(tree) == 4 and tree[2] == "in":
            return tree[3]
        interval = _interval(tree)
        return tree if interval is None else interval
    if tree[0] == "list" and all(item[0] == "relation" and _interval(item) is not None for item in tree[1:]):
        return ("union", *(_interval(item) for item in tree[1:]))
    return tree


def _equal_relations(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    if gold[0] != "relation" and gold[0] != "list" and assignment(answer) is None:  # sin x = 1/2 answers 1/2
        last = answer[-1]
        if all(sign == "=" for sign in answer[2::2]) and not _variables(last) and not _variables(gold):
            return _equal(gold, last, rules)
    gold_assigned, answer_assigned = assignment(gold), assignment(answer)
    if gold_assigned and answer_assigned and gold_assigned[0] and answer_assigned[0]:
        if gold_assigned[0] == answer_assigned[0]:
            return _equal(gold_assigned[1], answer_assigned[1], rules)
        if not _variables(gold_assigned[1]) and not _variables(answer_assigned[1]):
            return False
    elif (gold_assigned or gold[0] != "relation") and (answer_assigned or answer[0] != "relation"):
        values = (gold_assigned or ("", gold))[1], (answer_assigned or ("", answer))[1]
        return _equal(*values, rules)
    if gold[0] != "relation" or answer[0] != "relation":
        relation = gold if gold[0] == "relation" else answer
        return False if all(sign in ("=", "~", "!=") for sign in relation[2::2]) else None
    gold_sides, answer_sides = _two_sides(gold), _two_sides(answer)
    if gold_sides is None or answer_sides is None:
        return None
    if gold_sides[1] != answer_sides[1]:
        return False
    return rules.proportional(gold_sides[0], answer_sides[0], gold_sides[1] in ("<", "<="))


def assignment(tree: Tree) -> tuple[str, Tree] | None:
    """``x = 5``, ``5 = x``, ``x = 2 + 3 = 5`` -> (x, 5); ``2 + 3 = 5`` -> ("", 5); None for any other tree."""
    if tree[0] != "relation" or any(sign not in ("=", "~") for sign in tree[2::2]):
        return None
    sides = list(tree[1::2])
    if "~" in tree[2::2]:
        first = tree[2::2].index("~")
        sides = sides[: first + 1] if first or sides[0][0] != "var" else sides
        if len(sides) == 1:
            return "", sides[0]
    if sides[0][0] == "var":
        return sides[0][1], sides[-1]
    if sides[-1][0] == "var":
        return sides[-1][1], sides[0]
    if sides[0][0] == "tuple" and all(part[0] == "var" for part in sides[0][3:]):
        return "", sides[-1]
    if not any(_variables(side) for side in sides[:-1]):
        return ("", sides[-1]) if not _variables(sides[-1]) else None
    if _is_label(sides[0]) and not _variables(sides[-1]):
        return "", sides[-1]
    return None


def _is_label(tree: Tree) -> bool:
    """A name of geometry on the left of a value: ``AB = 4``, ``NO/BO = 2``, ``V_1 : V_2 = 11 : 21``."""
    if tree[0] == "var":
        return tree[1][0].isupper() or "_" in tree[1]
    return tree[0] in ("mul", "div", "ratio") and all(_is_label(part) for part in tree[1:])


def _two_sides(relation: Tree) -> tuple[Tree, str] | None:
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
    """``x`` or ``f(x)``"""
    return tree[0] == "var" or (tree[0] == "mul" and len(tree) == 3 and all(part[0] == "var" for part in tree[1:]))


INFINITY: Tree = ("const", "inf")


def _interval(relation: Tree) -> Tree | None:
    """``1 < x <= 2`` -> the tree of (1, 2]; ``|x| < 3`` -> (-3, 3); None for any other relation."""
    sides, signs = list(relation[1::2]), list(relation[2::2])
    if signs[0] in (">", ">="):
        sides.reverse()
        signs = [{">": "<", ">=": "<="}.get(sign, "?") for sign in reversed(signs)]
    if any(sign not in ("<", "<=") for sign in signs):
        return None
    opening, closing = "(" if signs[0] == "<" else "[", ")" if signs[-1] == "<" else "]"
    small, large = sides[0], sides[-1]
    if len(sides) == 2:
        if small[0] == "call" and small[1] == "abs" and small[2][0] == "var" and not _variables(large):
            return ("tuple", opening, closing, negated(large), large)
        if small[0] == "var" and not _variables(large):
            return ("tuple", "(", closing, ("neg", INFINITY), large)
        if large[0] == "var" and not _variables(small):
            return ("tuple", opening, ")", small, INFINITY)
    if len(sides) == 3 and _is_name(sides[1]) and not _variables(small) and not _variables(large):
        return ("tuple", opening, closing, small, large)
    return None


def _equal_values(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    kinds = (gold[0], answer[0])
    if kinds == ("tuple", "tuple"):
        return _equal_tuples(gold, answer, rules)
    if "union" in kinds:
        return _unordered(gold[1:], answer[1:], rules) if kinds == ("union", "union") else False
    if "matrix" in kinds:
        return _equal_matrices(gold, answer, rules)
    if "ratio" in kinds:
        return _equal_ratios(gold, answer, rules)
    if "base" in kinds:
        return kinds == ("base", "base") and gold[1:] == answer[1:]
    if not any(kind in ("list", "set", "tuple") for kind in kinds):
        return _equal_leaves(gold, answer, rules)
    gold_named, answer_named = _named(_items(gold)), _named(_items(answer))
    if gold_named is not None and answer_named is not None:
        if gold_named.keys() != answer_named.keys():
            return False
        return _all(_equal(gold_named[name], answer_named[name], rules) for name in gold_named)
    if gold_named is not None or answer_named is not None:  # x = 1, y = 2 is the pair (1, 2)
        named, other = (gold_named, answer) if gold_named is not None else (answer_named, gold)
        assert named is not None
        values = tuple(named.values())
        if other[0] == "list":
            return _in_order(values, other[1:], rules) or _unordered(values, other[1:], rules)
        in_order_of_names = ("tuple", "(", ")", *(named[name] for name in sorted(named)))
        return other[0] == "tuple" and _equal_tuples(in_order_of_names, other, rules)
    gold, answer = _grouped(gold), _grouped(answer)
    for one, two in ((gold, answer), (answer, gold)):
        if one[0] == "tuple":
            if two[0] == "list" and one[1:3] == ("(", ")"):
                return _in_order(one[3:], two[1:], rules)
            if two[0] in ("list", "set") and one[1:3] == ("[", "]"):
                return _unordered(one[3:], two[1:], rules)
            return False
    return _unordered(_items(gold), _items(answer), rules)


def _equal_leaves(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    for kind in ("percent", "degrees"):
        kinds = (gold[0] == kind, answer[0] == kind)
        if any(kinds):
            bare = rules.leaf(gold[1] if kinds[0] else gold, answer[1] if kinds[1] else answer)
            if bare or kind == "degrees" or all(kinds):
                return bare
            value = rules.leaf(gold, answer)  # 25% is 0.25, and 25 where the problem asks for a percentage
            return True if value else None if None in (bare, value) else False
    return rules.leaf(gold, answer)


def _items(tree: Tree) -> tuple[Tree, ...]:
    """The members of a list, set, or tuple; anything else is its own only member."""
    return tree[1:] if tree[0] in ("list", "set") else tree[3:] if tree[0] == "tuple" else (tree,)


def _named(items: tuple[Tree, ...]) -> dict[str, Tree] | None:
    """``x = 1, y = 2`` -> {x: 1, y: 2}; None where a name is missing or occurs twice, and for a single one."""
    if len(items) < 2:
        return None
    named: dict[str, Tree] = {}
    for item in items:
        assigned = assignment(item)
        if assigned is None or not assigned[0] or assigned[0] in named:
            return None
        named[assigned[0]] = assigned[1]
    return named


def _grouped(tree: Tree) -> Tree:
    """``p = 5, q = 2, p = 7, q = 2`` -> the list of (5, 2) and (7, 2)."""
    if tree[0] != "list" or len(tree) < 5:
        return tree
    names, values = zip(*(assignment(item) or ("", item) for item in tree[1:]), strict=True)
    period = len(set(names))
    if "" in names or period in (1, len(names)) or names != names[:period] * (len(names) // period):
        return tree
    return ("list", *(("tuple", "(", ")", *values[i : i + period]) for i in range(0, len(values), period)))


def _equal_tuples(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    if len(gold) != len(answer):
        return False
    for bracket, side in ((1, 3), (2, -1)):
        infinite = _is_infinite(gold[side]) and _is_infinite(answer[side])
        if gold[bracket] != answer[bracket] and not infinite:
            return False
    return _in_order(gold[3:], answer[3:], rules)


def _equal_matrices(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    rows: list[Sequence[Tree]] = []
    for tree in (gold, answer):
        if tree[0] == "matrix":
            rows.append(tree[1:])
        elif tree[:3] == ("tuple", "(", ")"):  # it stands for a column
            rows.append([(cell,) for cell in tree[3:]])
        else:
            return None if _has_kind(tree, "matrix") else False  # a sum or product of matrices: Math-Verify's
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    left, right = ([cell for row in matrix for cell in row] for matrix in rows)
    return _in_order(left, right, rules)


def _equal_ratios(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    if gold[0] == answer[0] and len(gold) > 3:
        return _in_order(gold[1:], answer[1:], rules)
    gold, answer = (("div", *t[1:]) if t[0] == "ratio" and len(t) == 3 else t for t in (gold, answer))
    return False if "ratio" in (gold[0], answer[0]) else _equal_values(gold, answer, rules)


def _in_order(gold: Sequence[Tree], answer: Sequence[Tree], rules: Rules) -> bool | None:
    if len(gold) != len(answer):
        return False
    return _all(_equal(g, a, rules) for g, a in zip(gold, answer, strict=True))


def _unordered(gold: Sequence[Tree], answer: Sequence[Tree], rules: Rules) -> bool | None:
    """Is there a matching of equal members? Values only: ``x = 1, x = 2`` counts as 1, 2."""
    if len(gold) != len(answer):
        return False
    gold, answer = ([(assignment(tree) or ("", tree))[1] for tree in side] for side in (gold, answer))
    gold_numbers, answer_numbers = [rational(g) for g in gold], [rational(a) for a in answer]
    if None not in gold_numbers and None not in answer_numbers:
        return Counter(gold_numbers) == Counter(answer_numbers)
    if len(gold) > MAX_ITEMS:
        return True if _in_order(gold, answer, rules) else None
    left, unsure = list(answer), False
    for g in gold:
        results = [_equal(g, a, rules) for a in left]
        if True in results:
            del left[results.index(True)]
        elif None in results:
            unsure = True
        else:
            return False
    return None if unsure else True


def _all(results: object) -> bool | None:
    seen = set(results)  # type: ignore
    return False if False in seen else None if None in seen else True


def _is_infinite(tree: Tree) -> bool:
    return tree == INFINITY or tree == ("neg", INFINITY)


def _variables(tree: object) -> bool:
    return _has_kind(tree, "var")


def _has_kind(tree: object, kind: str) -> bool:
    return isinstance(tree, tuple) and bool(tree) and (tree[0] == kind or any(_has_kind(p, kind) for p in tree[1:]))


def expanded(tree: Tree) -> Tree:
    r"""``a \pm b`` -> the list of a + b and a - b, wherever it stands."""
    if not _has_kind(tree, "pm"):
        return tree
    if tree[0] == "list":
        items: list[Tree] = []
        for item in tree[1:]:
            both = expanded(item)
            items += both[1:] if both[0] == "list" and item[0] != "list" else [both]
        return ("list", *items)
    if tree[0] == "relation" and _has_kind(tree[-1], "pm"):
        tree = tree[-1]
    return ("list", _chosen(tree, False), _chosen(tree, True))


def _chosen(tree: Tree, minus: bool) -> Tree:
    if not isinstance(tree, tuple):
        return tree
    if tree and tree[0] == "pm":
        left, right = _chosen(tree[1], minus), _chosen(tree[2], minus)
        right = negated(right) if minus else right
        return right if left == ("num", Fraction(0)) else ("add", left, right)
    return tuple(_chosen(part, minus) for part in tree)


def exact_leaf(gold: Tree, answer: Tree) -> bool | None:
    """Rational numbers by their value, other expressions by their form; None where the forms differ."""
    if gold == answer:
        return True
    p, q = rational(gold), rational(answer)
    if p is not None and q is not None:
        return p == q
    for number, other in ((p, answer), (q, gold)):
        if number is not None and (_is_infinite(other) or certainly_huge(other)):
            return False
    if _is_infinite(gold) and _is_infinite(answer):
        return False  # they would be the same tree
    return _same_form(gold, answer)


def _sorted(tree: Tree) -> Tree:
    """The same tree with the operands of sums and products in one order."""
    if not isinstance(tree, tuple) or not tree:
        return tree
    parts = [_sorted(part) if isinstance(part, tuple) else part for part in tree[1:]]
    if tree[0] in ("add", "mul"):
        flat: list[Tree] = []
        for part in parts:
            flat += part[1:] if part[0] == tree[0] else [part]
        parts = sorted(flat, key=repr)
    return (tree[0], *parts)


def _same_form(gold: Tree, answer: Tree, positive: bool = False) -> bool | None:
    return True if _sorted(gold) == _sorted(answer) else None


EXACT = Rules(exact_leaf, _same_form)
