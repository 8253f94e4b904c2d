r"""Two trees -> equal, different, or undecided. This module compares the structure, and `Rules` single expressions.

Lists and sets have no order; tuples are ordered; intervals have brackets. ``x = 5`` is 5, ``1 < x <= 2`` is (1, 2], and
``a \pm b`` is two values. Equations are equal up to a factor. The functions return None if the rules cannot decide.
`EXACT` decides rational numbers and equal forms. The rules of numeric.py decide the others, in the worker.

>>> from grpo_math.grading.equal.expression import parse
>>> equal(parse("1, 2"), parse("2, 1"), EXACT), equal(parse("(1, 2)"), parse("(2, 1)"), EXACT)
(True, False)
>>> equal(parse(r"\sqrt{12}"), parse(r"2\sqrt{3}"), EXACT) is None
True

Does not read texts, and does not compare units.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any, NamedTuple

from grpo_math.grading.equal.exact import rational
from grpo_math.grading.equal.expression import Tree, negated
from grpo_math.grading.equal.relations import (
    as_union,
    difference,
    has_kind,
    has_names,
    is_infinite,
    loose_names,
    names,
    resolved,
    sides,
    stated,
    values,
)
from grpo_math.grading.verdict import POLICY, GradingPolicy

CHOICES = frozenset("ABCDEFGHIJ")
MAX_DIGITS = 60  # significant digits of a decimal that can equal the number it is rounded from


class Rules(NamedTuple):
    """Functions that compare single expressions and equations, and that return the number of an expression."""

    leaf: Callable[[Tree, Tree, int], bool | None]  # the last argument is the policy's digits
    proportional: Callable[[Tree, Tree, bool], bool | None]
    number: Callable[[Tree], Any]
    policy: GradingPolicy = POLICY
    items: int = 12  # of an unordered list with more than numbers; a longer list is compared in order


def equal(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    """Return True if two answers are equal, and None if `rules` cannot decide."""
    if gold[0] == "tuple" and answer[0] == "pm":
        return False
    return _equal(expanded(gold), expanded(answer), rules)


def _equal(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    if gold == answer:
        return True
    gold, answer = resolved(gold), resolved(answer)
    if gold[0] == answer[0] == "relation":
        return _equal_relations(gold, answer, rules)
    if answer[0] == "relation":
        return _gives(gold, answer, rules)
    if gold[0] == "relation":
        # The value of an equation is an answer: the gold answer a + b = 6 accepts 6.
        given = (values(gold) or ()) if sides(gold) and not has_names(answer) else (stated(gold) or ("", ()))[1]
        if not given and answer[0] != "list":
            return _undecided_unless_equation(gold)
        return _equal(given[-1], answer, rules) if given else False
    return _equal_values(gold, answer, rules)


def _gives(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    """Return True if the relation ``answer`` gives the value ``gold`` and no other."""
    if sides(answer) is None:
        return _undecided_unless_equation(answer) if gold[0] in ("tuple", "union", "meet", "set") else False
    if has_names(gold):
        if gold[0] == "var" and CHOICES & names(answer) - {gold[1]}:  # A = B chooses two
            return False
        named = stated(answer)
        given = named[1] if named is not None else tuple(sides(answer) or ())
    else:
        given = values(answer) or ()
        given = tuple(side for side in given if not has_names(side)) or given
    return _all(_equal(gold, side, rules) for side in given) if given else False


def _undecided_unless_equation(relation: Tree) -> bool | None:
    if relation[2::2] == ("in",) and not has_names(relation[1]):
        return False
    collected = any(side[0] in ("tuple", "set", "union", "matrix") for side in relation[1::2])
    if collected and any(sign[0] in "<>" for sign in relation[2::2]):
        return False  # nothing is greater than an interval
    return False if all(sign in ("=", "~", "!=") for sign in relation[2::2]) else None


def _equal_relations(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    one, two = stated(gold), stated(answer)
    if one and two:
        if one[0] == two[0] or not one[0] or not two[0]:
            return _all(_equal(one[1][-1], side, rules) for side in two[1])
        if not any(map(has_names, one[1] + two[1])):
            return False
    if one and not two and not any(map(has_names, one[1])):
        return False  # gold x = 5, answer 2x = 10: not solved
    left, right = difference(gold), difference(answer)
    if left is None or right is None:
        numbers = {rational(side) for side in sides(answer) or ()} - {None}
        return False if len(numbers) > 1 else None
    return False if left[1] != right[1] else rules.proportional(left[0], right[0], left[1] in ("<", "<="))


def _equal_values(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    gold, answer = (_without_zeros(t) if has_kind(t, "matrix") or has_kind(t, "base") else t for t in (gold, answer))
    kinds = (gold[0], answer[0])
    if kinds == ("tuple", "tuple"):
        return _equal_tuples(gold, answer, rules)
    if "union" in kinds or "meet" in kinds:
        return _equal_unions(gold, answer, rules)
    if "matrix" in kinds:
        return _equal_matrices(gold, answer, rules)
    if "ratio" in kinds:
        return _equal_ratios(gold, answer, rules)
    if has_kind(gold, "base") or has_kind(answer, "base"):  # 101_2 equals only 101_2
        return gold == answer
    if not any(kind in ("list", "set", "tuple") for kind in kinds):
        return _equal_leaves(gold, answer, rules)
    gold_named, answer_named = _named(_items(gold)), _named(_items(answer))
    if gold_named is not None and answer_named is not None:
        if gold_named.keys() != answer_named.keys():
            return False
        return _all(_equal(gold_named[name], answer_named[name], rules) for name in gold_named)
    for one, two in ((gold, answer), (answer, gold)):  # a pair without brackets, or a list in brackets
        if one[:3] == ("tuple", "(", ")") and two[0] == "list" and (one is gold or not _could_be_interval(one)):
            return _in_order(_items(gold), _items(answer), rules)
    if "tuple" in (gold[0], answer[0]):
        return False
    return _unordered(_items(gold), _items(answer), rules)


def _could_be_interval(pair: Tree) -> bool:
    ends = [rational(end) for end in pair[3:]]
    return len(ends) == 2 and (ends[0] is None or ends[1] is None or ends[0] < ends[1])


def _without_zeros(tree: Tree) -> Tree:
    if tree[0] != "add":
        return tree
    kept = [part for part in tree[1:] if part not in (("num", Fraction(0)), ("neg", ("num", Fraction(0))))]
    return kept[0] if len(kept) == 1 else ("add", *kept)


def _equal_unions(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    if any(tree[0] not in ("union", "meet", "tuple", "set") for tree in (gold, answer)):
        return False
    if any(map(_backwards, (gold, answer))):  # pairs, not intervals
        return False
    if gold[0] == answer[0] == "union" and _unordered(gold[1:], answer[1:], rules):
        return True
    one, two = as_union(gold, rules.number), as_union(answer, rules.number)
    return None if one is None or two is None else one == two


def _backwards(tree: Tree) -> bool:
    """Return True if the tree, or a part of a union, is a pair with the larger number first, so not an interval."""
    if tree[0] in ("union", "meet"):
        return any(map(_backwards, tree[1:]))
    ends = [rational(end) for end in tree[3:]] if tree[0] == "tuple" else []
    return len(ends) == 2 and ends[0] is not None and ends[1] is not None and ends[0] > ends[1]


def _equal_leaves(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    digits, as_number = rules.policy.digits, rules.policy.percent_as_number
    for kind in ("percent", "degrees"):
        kinds = (gold[0] == kind, answer[0] == kind)
        if any(kinds):
            bare = rules.leaf(gold[1] if kinds[0] else gold, answer[1] if kinds[1] else answer, digits)
            if kind == "degrees" or all(kinds) or (bare and as_number):
                return bare
            # 25% is 0.25, and also 25, because a problem may ask for a percentage.
            value = rules.leaf(gold, answer, digits)
            bare = bare if as_number else False
            return True if value else None if None in (bare, value) else False
    return rules.leaf(gold, answer, digits)


def _items(tree: Tree) -> tuple[Tree, ...]:
    """Return the members of a list, set or tuple, or a tuple with just the tree."""
    return tree[1:] if tree[0] in ("list", "set") else tree[3:] if tree[0] == "tuple" else (tree,)


def _named(items: tuple[Tree, ...]) -> dict[str, Tree] | None:
    """``x = 1, y = 2`` -> {x: 1, y: 2}; None if a name is missing or repeated, or there is only one item."""
    if len(items) < 2:
        return None
    named: dict[str, Tree] = {}
    for item in items:
        name, value = _assigned(item)
        if not name or name in named:
            return None
        named[name] = value
    return named


def _assigned(item: Tree) -> tuple[str, Tree]:
    """``x = 1`` -> (x, 1); any other item, and a chain with more than one value -> ("", item)."""
    assignment = stated(item)
    return (assignment[0], assignment[1][0]) if assignment is not None and len(assignment[1]) == 1 else ("", item)


def _equal_tuples(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    if len(gold) != len(answer):
        return False
    for bracket, side in ((1, 3), (2, -1)):
        infinite = is_infinite(gold[side]) and is_infinite(answer[side])
        if gold[bracket] != answer[bracket] and not infinite:
            return False
    return _in_order(gold[3:], answer[3:], rules)


def _equal_matrices(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    one, two = _rows(gold), _rows(answer)
    if one is None or two is None or list(map(len, one)) != list(map(len, two)):
        return False
    return _in_order(list(chain(*one)), list(chain(*two)), rules)


def _rows(tree: Tree) -> list[tuple[Tree, ...]] | None:
    """Return the rows of a matrix. A tuple is a column."""
    if tree[0] == "matrix":
        return list(tree[1:])
    if tree[:3] == ("tuple", "(", ")"):
        return [(cell,) for cell in tree[3:]]
    return None


def _equal_ratios(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    gold, answer = (("div", *t[1:]) if t[0] == "ratio" and len(t) == 3 else t for t in (gold, answer))
    return False if "ratio" in (gold[0], answer[0]) else _equal_values(gold, answer, rules)


def _in_order(gold: Sequence[Tree], answer: Sequence[Tree], rules: Rules) -> bool | None:
    if len(gold) != len(answer):
        return False
    return _all(_equal(g, a, rules) for g, a in zip(gold, answer, strict=True))


def _unordered(gold: Sequence[Tree], answer: Sequence[Tree], rules: Rules) -> bool | None:
    """Return True if the members can be matched in equal pairs. Names are ignored: ``x = 1, x = 2`` is 1, 2."""
    if len(gold) != len(answer):
        return False
    gold, answer = ([_assigned(tree)[1] for tree in side] for side in (gold, answer))
    gold_numbers, answer_numbers = [rational(g) for g in gold], [rational(a) for a in answer]
    if None not in gold_numbers and None not in answer_numbers:
        return Counter(gold_numbers) == Counter(answer_numbers)
    if len(gold) > rules.items:
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


def expanded(tree: Tree) -> Tree:
    r"""``a \pm b`` -> the list of a + b and a - b, anywhere in the tree."""
    if not has_kind(tree, "pm"):
        return tree
    if tree[0] in ("list", "either"):
        items: list[Tree] = []
        for item in tree[1:]:
            both = expanded(item)
            items += both[1:] if both[0] == "list" and item[0] != "list" else [both]
        return ("list", *items)
    if tree[0] == "relation" and len(tree) == 4 and tree[2] == "=" and has_kind(tree[3], "pm"):
        tree = tree[3] if has_names(tree[1]) and stated(tree) is not None else tree
    return ("list", _chosen(tree, False), _chosen(tree, True))


def _chosen(tree: Tree, minus: bool) -> Tree:
    if not isinstance(tree, tuple):
        return tree
    if tree and tree[0] == "pm":
        left, right = _chosen(tree[1], minus), _chosen(tree[2], minus)
        right = negated(right) if minus else right
        return right if left == ("num", Fraction(0)) else ("add", left, right)
    return tuple(_chosen(part, minus) for part in tree)


def exact_leaf(gold: Tree, answer: Tree, digits: int = POLICY.digits) -> bool | None:
    """Compare rational numbers by value and other expressions by form. Return None if the forms differ."""
    if gold == answer:
        return True
    if loose_names(answer) and not has_names(gold):  # n o t 0 is not 0
        return False
    p, q = rational(gold), rational(answer)
    if p is not None and q is not None:
        return p == q or stands_for(p, q, digits) or stands_for(q, p, digits)
    for number, other in ((p, answer), (q, gold)):
        if number is not None and is_infinite(other):
            return False
    return _same_form(gold, answer)


def places(decimal: Fraction, digits: int = POLICY.digits) -> int | None:
    """Return the decimal places of a decimal with at least ``digits`` significant digits, else None.

    >>> places(Fraction("0.333333333333")), places(Fraction("0.333")), places(Fraction(1, 3))
    (12, None, None)
    """
    if not digits or decimal.denominator == 1 or decimal.denominator.bit_length() > 4 * MAX_DIGITS:
        return None
    n, twos, fives = decimal.denominator, 0, 0
    while n % 2 == 0:
        n, twos = n // 2, twos + 1
    while n % 5 == 0:
        n, fives = n // 5, fives + 1
    at = max(twos, fives)
    return at if n == 1 and len(str(abs(decimal.numerator) * 10**at // decimal.denominator)) >= digits else None


def stands_for(decimal: Fraction, exact: Fraction, digits: int) -> bool:
    """Return True if a decimal with at least ``digits`` significant digits is ``exact``, rounded or truncated."""
    at = places(decimal, digits)
    return at is not None and abs(decimal - exact) * 10**at < 1


def _form(tree: Tree) -> str:
    """Return the tree as a text, with the operands of sums and products sorted."""
    if not isinstance(tree, tuple):
        return f"{tree.numerator:x}/{tree.denominator:x}" if isinstance(tree, Fraction) else repr(tree)
    parts = list(_operands(tree, tree[0])) if tree[:1] in (("add",), ("mul",)) else tree
    forms = [_form(part) for part in parts]
    return f"({tree[0]} {' '.join(sorted(forms))})" if parts is not tree else f"({' '.join(forms)})"


def _operands(tree: Tree, kind: str) -> Iterator[Tree]:
    for part in tree[1:]:
        yield from _operands(part, kind) if part[0] == kind else (part,)


def _same_form(gold: Tree, answer: Tree, positive: bool = False) -> bool | None:
    return True if _form(gold) == _form(answer) else None


EXACT = Rules(exact_leaf, _same_form, rational)
