r"""Compare two trees. This module compares the structure, and `Rules` single expressions.

Lists and sets have no order; tuples are ordered; intervals have brackets. ``x = 5`` is 5, ``1 < x <= 2`` is (1, 2], and
``a \pm b`` is two values. Equations are equal up to a factor. The result is UNDECIDED if the rules cannot decide.
`EXACT` decides rational numbers and equal forms. The rules of numeric.py decide the others, in the worker.

>>> from grpo_math.grading.equal.expression import parse
>>> equal(parse("1, 2"), parse("2, 1"), EXACT).value, equal(parse("(1, 2)"), parse("(2, 1)"), EXACT).value
('equal', 'different')
>>> equal(parse(r"\sqrt{12}"), parse(r"2\sqrt{3}"), EXACT).value
'undecided'
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain, product
from typing import Any, NamedTuple

from grpo_math.grading.equal.exact import is_rounded, rational, stands_for
from grpo_math.grading.equal.relations import (
    as_union,
    difference,
    equation_members,
    is_unsolved,
    resolved,
    sides,
    values,
)
from grpo_math.grading.equal.tree import (
    DIFFERENT,
    EQUAL,
    PI,
    UNDECIDED,
    ZERO,
    Based,
    Both,
    Comparison,
    Degrees,
    Either,
    Intersection,
    List,
    Matrix,
    MinusPlus,
    Negative,
    Number,
    Percent,
    PlusMinus,
    Product,
    Quotient,
    Ratio,
    Relation,
    Set,
    Sum,
    Tree,
    Tuple,
    Union,
    Variable,
    compared,
    contains,
    has_loose_names,
    has_names,
    is_infinite,
    joined,
    names,
    negated,
    rebuilt,
    walk,
)  # fmt: skip
from grpo_math.grading.verdict import POLICY, GradingPolicy

CHOICES = frozenset("ABCDEFGHIJ")
COLLECTIONS = Tuple | Union | Intersection | Set


class Rules(NamedTuple):
    """Functions that compare single expressions and equations, and that return the number of an expression."""

    leaf: Callable[[Tree, Tree, int], Comparison]  # the last argument is the policy's digits
    proportional: Callable[[Tree, Tree, bool], Comparison]
    number: Callable[[Tree], Any]
    policy: GradingPolicy = POLICY
    items: int = 12  # of an unordered list with more than numbers; a longer list is compared in order


def equal(gold: Tree, answer: Tree, rules: Rules) -> Comparison:
    """Compare two answers. The result is undecided if `rules` cannot decide."""
    match gold, answer:
        case (Relation((Product((f, Variable(x))), _)), Relation((Product((g, Variable(y))), _))) if f == g and x != y:
            # The name of a function's variable is free: f(x) = 2x and f(t) = 2t.
            return DIFFERENT if x in names(answer) else equal(gold, _renamed(answer, y, x), rules)
    if isinstance(gold, Tuple) and isinstance(answer, PlusMinus):
        return DIFFERENT
    return _equal(expanded(gold), expanded(answer), rules)


def _renamed(tree: Tree, old: str, new: str) -> Tree:
    return Variable(new) if tree == Variable(old) else rebuilt(tree, lambda part: _renamed(part, old, new))


def _equal(gold: Tree, answer: Tree, rules: Rules) -> Comparison:
    if isinstance(answer, Either) and not isinstance(gold, Relation | List | Both | Either | COLLECTIONS):
        return _all(_equal(gold, part, rules) for part in answer.parts)  # 1/2 or 0.5
    match resolved(gold), resolved(answer):
        case Relation() as one, Relation() as two if one == two:
            return EQUAL
        case Relation() as one, Relation() as two:
            return _equal_relations(one, two, rules)
        case one, Relation() as two:
            return _gives(one, two, rules)
        case Relation(parts, signs), Number() as two if "~" in signs and two in parts:  # 2/3, about 0.67
            return EQUAL
        case Relation() as one, two:
            # The value of an equation is an answer: the gold answer a + b = 6 accepts 6.
            given = values(one) if sides(one) and not has_names(two) else (equation_members(one) or ("", ()))[1]
            return _equal(given[-1], two, rules) if given else DIFFERENT
        case one, two:
            return _equal_values(one, two, rules)


def _gives(gold: Tree, answer: Relation, rules: Rules) -> Comparison:
    """Compare a value with the relation ``answer``, which must give this value and no other."""
    if sides(answer) is None:
        return DIFFERENT
    if has_names(gold):
        if isinstance(gold, Variable) and CHOICES & names(answer) - {gold.name}:  # A = B chooses two
            return DIFFERENT
        named, members = equation_members(answer), sides(answer) or [answer]
        asked = named is None and names(members[0]).isdisjoint(names(gold)) and not is_unsolved(members[0])
        given = named[1] if named is not None else tuple(members[1:] if asked else members)  # xy = n + 1
    else:
        given = values(answer)
        given = tuple(side for side in given if not has_names(side)) or given
    return _all(_equal(gold, side, rules) for side in given) if given else DIFFERENT


def _equal_relations(gold: Relation, answer: Relation, rules: Rules) -> Comparison:
    one, two = equation_members(gold), equation_members(answer)
    if one and two and (one[0] == two[0] or not one[0] or not two[0]):
        return _all(_equal(one[1][-1], side, rules) for side in two[1])
    if one and not any(map(has_names, one[1])):
        return DIFFERENT  # gold x = 5, answer 2x = 10: not solved
    left, right = difference(gold), difference(answer)
    if left is None or right is None:
        numbers = {rational(side) for side in sides(answer) or ()} - {None}
        return DIFFERENT if len(numbers) > 1 else UNDECIDED
    return DIFFERENT if left[1] != right[1] else rules.proportional(left[0], right[0], left[1] in ("<", "<="))


def _equal_values(gold: Tree, answer: Tree, rules: Rules) -> Comparison:
    gold, answer = (_without_zeros(tree) if contains(tree, Matrix, Based) else tree for tree in (gold, answer))
    match gold, answer:
        case (Set((Tuple() as pair,)), Tuple() as other) | (Tuple() as other, Set((Tuple() as pair,))):  # {(1, 2)}
            return _equal_tuples(pair, other, rules)
        case Tuple(), Tuple():
            return _equal_tuples(gold, answer, rules)
        case (Union() | Intersection(), _) | (_, Union() | Intersection()):
            return _equal_unions(gold, answer, rules)
        case (Matrix(), _) | (_, Matrix()):
            return _equal_matrices(gold, answer, rules)
        case (Ratio(), _) | (_, Ratio()):
            return _equal_ratios(gold, answer, rules)
    if contains(gold, Based) or contains(answer, Based):  # 101_2 equals only 101_2
        return compared(gold == answer)
    if not isinstance(gold, List | Set | Tuple) and not isinstance(answer, List | Set | Tuple):
        return _equal_leaves(gold, answer, rules)
    gold, answer = _grouped(gold), _grouped(answer)
    gold_named, answer_named = _named(_items(gold)), _named(_items(answer))
    if gold_named is not None and answer_named is not None:
        if gold_named.keys() != answer_named.keys():
            return DIFFERENT
        return _all(_equal(gold_named[name], answer_named[name], rules) for name in gold_named)
    match gold, answer:  # a pair without brackets, or a list in brackets
        case (Tuple(opening="(", closing=")"), List()):
            return _in_order(_items(gold), _items(answer), rules)
        case (List(), Tuple(opening="(", closing=")")) if gold_named or not _could_be_interval(answer):
            return _in_order(_items(gold), _items(answer), rules)
        case (Tuple(), _) | (_, Tuple()):
            return DIFFERENT
        # The values of x and y have an order without their names too; those of x_1 and x_2 have none.
        case (List(parts), _) if len({name.partition("_")[0] for name in gold_named or ()}) == len(parts):
            return _in_order(parts, _items(answer), rules)
    return _unordered(_items(gold), _items(answer), rules)


def _could_be_interval(tree: Tree) -> bool:
    match [rational(end) for end in tree.children()]:
        case [start, end]:
            return start is None or end is None or start < end
    return False


def _without_zeros(tree: Tree) -> Tree:
    parts = tree.parts if isinstance(tree, Sum) else ()
    return joined(Sum, [part for part in parts if part not in (ZERO, Negative(ZERO))]) if parts else tree


def _equal_unions(gold: Tree, answer: Tree, rules: Rules) -> Comparison:
    if not isinstance(gold, COLLECTIONS) or not isinstance(answer, COLLECTIONS):
        return DIFFERENT
    if isinstance(gold, Union) and isinstance(answer, Union) and _unordered(gold.parts, answer.parts, rules) is EQUAL:
        return EQUAL
    pairs = [node for node in chain(walk(gold), walk(answer)) if isinstance(node, Tuple) and len(node.parts) == 2]
    if not all(map(_could_be_interval, pairs)):
        return DIFFERENT
    one, two = as_union(gold, rules.number), as_union(answer, rules.number)
    return UNDECIDED if one is None or two is None else compared(one == two)


def _equal_leaves(gold: Tree, answer: Tree, rules: Rules) -> Comparison:
    digits, as_number = rules.policy.digits, rules.policy.percent_as_number
    bare = [tree.operand if isinstance(tree, Percent | Degrees) else tree for tree in (gold, answer)]
    kinds = {type(tree) for tree in (gold, answer)} & {Percent, Degrees}
    if not kinds:
        rounded = rules.policy.rounded_golds and is_rounded(gold, answer, rules.number)
        return EQUAL if rounded else rules.leaf(gold, answer, digits)
    same = rules.leaf(bare[0], bare[1], digits)
    if kinds == {Degrees} and any(node == PI for tree in (gold, answer) for node in walk(tree)):  # 45° and pi/4
        return rules.leaf(gold, answer, digits)
    if kinds == {Degrees} or type(gold) is type(answer) or (same is EQUAL and as_number):
        return same
    # 25% is 0.25, and also 25, because a problem may ask for a percentage.
    value = rules.leaf(gold, answer, digits)
    return value if value is EQUAL or not as_number or same is DIFFERENT else UNDECIDED


def _items(tree: Tree) -> tuple[Tree, ...]:
    """Return the members of a list, set or tuple, or a tuple with just the tree."""
    return tree.parts if isinstance(tree, List | Set | Tuple) else (tree,)


def _named(items: tuple[Tree, ...]) -> dict[str, Tree] | None:
    """``x = 1, y = 2`` -> {x: 1, y: 2}; None if a name is missing or repeated."""
    named = dict(map(_assigned, items))
    return named if len(named) == len(items) and "" not in named else None


def _grouped(tree: Tree) -> Tree:
    """``x = 1, y = 2, x = 3, y = 4`` -> the list of ``x = 1, y = 2`` and ``x = 3, y = 4``."""
    labels = [_assigned(item)[0] for item in _items(tree)]
    width = len(set(labels))
    repeated = 1 < width < len(labels) and labels == labels[:width] * (len(labels) // width)
    if not repeated or "" in labels or not isinstance(tree, List):
        return tree
    return List(tuple(List(tree.parts[at : at + width]) for at in range(0, len(labels), width)))


def _assigned(item: Tree) -> tuple[str, Tree]:
    """``x = 1`` -> (x, 1); any other item, and a chain with more than one value -> ("", item)."""
    assignment = equation_members(item)
    return (assignment[0], assignment[1][0]) if assignment is not None and len(assignment[1]) == 1 else ("", item)


def _equal_tuples(gold: Tuple, answer: Tuple, rules: Rules) -> Comparison:
    ends = [(gold.opening, answer.opening, 0), (gold.closing, answer.closing, -1)]
    for one, two, side in ends:
        if one != two and not (is_infinite(gold.parts[side]) and is_infinite(answer.parts[side])):
            return DIFFERENT
    return _in_order(gold.parts, answer.parts, rules)


def _equal_matrices(gold: Tree, answer: Tree, rules: Rules) -> Comparison:
    one, two = _matrix(gold), _matrix(answer)
    if one is None or two is None or one.widths != two.widths:
        return DIFFERENT
    return _in_order(one.parts, two.parts, rules)


def _matrix(tree: Tree) -> Matrix | None:
    """Return a matrix. A tuple is a column, and [[1, 2], [3, 4]] has rows."""
    match tree:
        case Matrix():
            return tree
        case Tuple(parts, "(", ")"):
            return Matrix(parts, (1,) * len(parts))
        case Tuple(rows, "[", "]") if all(isinstance(row, Tuple) for row in rows):
            cells = [tuple(row.children()) for row in rows]
            return Matrix(tuple(chain(*cells)), tuple(map(len, cells)))
    return None


def _equal_ratios(gold: Tree, answer: Tree, rules: Rules) -> Comparison:
    if isinstance(gold, Ratio) and isinstance(answer, Ratio) and len(gold.parts) == len(answer.parts) > 2:
        pairs = zip(gold.parts[1:], answer.parts[1:], strict=True)
        return _all(_equal(Quotient(g, gold.parts[0]), Quotient(a, answer.parts[0]), rules) for g, a in pairs)
    one, two = (Quotient(*t.parts) if isinstance(t, Ratio) and len(t.parts) == 2 else t for t in (gold, answer))
    return DIFFERENT if isinstance(one, Ratio) or isinstance(two, Ratio) else _equal_values(one, two, rules)


def _in_order(gold: Sequence[Tree], answer: Sequence[Tree], rules: Rules) -> Comparison:
    if len(gold) != len(answer):
        return DIFFERENT
    return _all(_equal(g, a, rules) for g, a in zip(gold, answer, strict=True))


def _unordered(gold: Sequence[Tree], answer: Sequence[Tree], rules: Rules) -> Comparison:
    """Match the members in equal pairs. Names are ignored: ``x = 1, x = 2`` is 1, 2."""
    if len(gold) != len(answer):
        return DIFFERENT
    gold, answer = ([_assigned(tree)[1] for tree in side] for side in (gold, answer))
    gold_numbers, answer_numbers = [rational(g) for g in gold], [rational(a) for a in answer]
    if None not in gold_numbers and None not in answer_numbers:
        return compared(Counter(gold_numbers) == Counter(answer_numbers))
    if len(gold) > rules.items:
        return EQUAL if _in_order(gold, answer, rules) is EQUAL else UNDECIDED
    left, unsure = list(answer), False
    for g in gold:
        results = [_equal(g, a, rules) for a in left]
        if EQUAL in results:
            del left[results.index(EQUAL)]
        elif UNDECIDED in results:
            unsure = True
        else:
            return DIFFERENT
    return UNDECIDED if unsure else EQUAL


def _all(results: Iterable[Comparison]) -> Comparison:
    seen = set(results)
    return DIFFERENT if DIFFERENT in seen else UNDECIDED if UNDECIDED in seen else EQUAL


def expanded(tree: Tree) -> Tree:
    r"""``a \pm b`` -> the list of a + b and a - b, anywhere in the tree.

    The signs in a set or a tuple are independent, except next to ``\mp``: ``(\pm 1, \pm 2)`` is four points.
    """
    if not contains(tree, PlusMinus):
        return tree
    match tree:
        case Tuple(parts) | List(parts) if _is_record(tree):
            signed = [(part,) if part == expanded(part) else expanded(part).children() for part in parts]
            return List(tuple(replace(tree, parts=choice) for choice in product(*signed)))
        case List(parts) | Either(parts) | Set(parts):
            items: list[Tree] = []
            for item in parts:
                both = expanded(item)
                items += both.parts if isinstance(both, List) and not isinstance(item, List) else [both]
            return List(tuple(items))
        case Relation(parts, signs) if any(isinstance(part, Set) for part in parts):
            return Relation(tuple(map(expanded, parts)), signs)
    return List((_chosen(tree, False), _chosen(tree, True)))


def _is_record(tree: Tuple | List) -> bool:
    r"""Return True for a few values with a name or a place, such as ``(\pm 1, 2)`` and ``x = \pm 1, y = 2``."""
    return (
        len(tree.parts) <= 4
        and (isinstance(tree, Tuple) or len(_named(tree.parts) or ()) > 1)
        and not any(contains(part, Tuple, List, Set, MinusPlus) for part in tree.parts)
    )


def _chosen(tree: Tree, minus: bool) -> Tree:
    """Return the tree with one of the two signs everywhere."""
    if not isinstance(tree, PlusMinus):
        return rebuilt(tree, lambda part: _chosen(part, minus))
    left, right = _chosen(tree.left, minus), _chosen(tree.right, minus)
    right = negated(right) if minus != isinstance(tree, MinusPlus) else right
    return right if left == ZERO else Sum((left, right))


def exact_leaf(gold: Tree, answer: Tree, digits: int = POLICY.digits) -> Comparison:
    """Compare rational numbers by value and other expressions by form. The result is undecided if the forms differ."""
    if has_loose_names(answer) and not has_names(gold) and not _may_cancel(answer):
        return DIFFERENT
    p, q = rational(gold), rational(answer)
    if p is not None and q is not None:
        return compared(p == q or stands_for(p, q, digits) or stands_for(q, p, digits))
    if (p is not None and is_infinite(answer)) or (q is not None and is_infinite(gold)):
        return DIFFERENT
    return _same_form(gold, answer)


def _may_cancel(tree: Tree) -> bool:
    """Return True if every variable occurs again, as in 3y - y - 2y. A factor 0 cancels nothing: n o t 0 is not 0."""
    nodes = list(walk(tree))
    variables = Counter(node.name for node in nodes if isinstance(node, Variable))
    return min(variables.values()) > 1 and not any(isinstance(node, Product) and ZERO in node.parts for node in nodes)


def _form(tree: Tree) -> str:
    """Return the tree as a text, with the operands of sums and products sorted."""
    forms = [_form(part) for part in _operands(tree, type(tree))]
    if isinstance(tree, Sum | Product):
        forms.sort()
    # Hexadecimal digits of a large number take linear time.
    labels = (v for v in tree.fields() if not isinstance(v, Tree) and v != getattr(tree, "parts", None))
    texts = (f"{v.numerator:x}/{v.denominator:x}" if isinstance(v, Fraction) else repr(v) for v in labels)
    return f"({type(tree).__name__} {' '.join((*texts, *forms))})"


def _operands(tree: Tree, kind: type[Tree]) -> Iterator[Tree]:
    for part in tree.children():
        yield from _operands(part, kind) if kind in (Sum, Product) and type(part) is kind else (part,)


def _same_form(gold: Tree, answer: Tree, positive: bool = False) -> Comparison:
    return EQUAL if _form(gold) == _form(answer) else UNDECIDED


EXACT = Rules(exact_leaf, _same_form, rational)
