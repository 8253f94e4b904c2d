"""The kinds of a parsed answer: one frozen dataclass for each, read by ``match``.

>>> Product((Number(Fraction(2)), Variable("x"))) == Product((Number(Fraction(2)), Variable("x")))
True
>>> sorted(names(Power(Variable("x"), Variable("n"))))
['n', 'x']
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any


class Comparison(Enum):
    """The result of comparing two trees. `UNDECIDED`: only a worker, or no rule, can tell."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNDECIDED = "undecided"


EQUAL, DIFFERENT, UNDECIDED = Comparison


def compared(same: bool) -> Comparison:
    """Return EQUAL or DIFFERENT."""
    return EQUAL if same else DIFFERENT


@dataclass(frozen=True)
class Tree:
    """Any kind."""

    def fields(self) -> list[Any]:
        """Return the values of the fields, in order."""
        return list(vars(self).values())

    def children(self) -> Iterator["Tree"]:
        """Yield the trees directly below this one."""
        for value in self.fields():
            yield from (part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Tree))


@dataclass(frozen=True)
class Number(Tree):
    """A rational number."""

    value: Fraction


@dataclass(frozen=True)
class Named(Tree):
    """A kind that is a name."""

    name: str


class Variable(Named):
    """A variable, a segment such as AB, or a label with a subscript."""


class Constant(Named):
    """One of pi, e, i and inf."""


@dataclass(frozen=True)
class Single(Tree):
    """A kind with one operand."""

    operand: Tree


class Negative(Single):
    """-a"""


class Factorial(Single):
    """a!"""


class Percent(Single):
    """a%"""


class Degrees(Single):
    """a°"""


@dataclass(frozen=True)
class Pair(Tree):
    """A kind with two operands."""

    left: Tree
    right: Tree


class Quotient(Pair):
    """a / b"""


class Power(Pair):
    """a^b"""


class PlusMinus(Pair):
    """a plus or minus b"""


class MinusPlus(PlusMinus):
    """a minus or plus b, with the other sign than the plus-minus signs of the same answer"""


class Residue(Pair):
    """a modulo b"""


@dataclass(frozen=True)
class Several(Tree):
    """A kind with any number of parts."""

    parts: tuple[Tree, ...]


class Sum(Several):
    """a + b + ..."""


class Product(Several):
    """a b ..."""


class Ratio(Several):
    """a : b : ..."""


class List(Several):
    """Values joined by commas. They have no order."""


class Both(Several):
    """Relations joined by "and"."""


class Either(Several):
    """Values joined by "or"."""


class Set(Several):
    """Values in braces."""


class Union(Several):
    """A union of sets."""


class Intersection(Several):
    """An intersection of sets."""


@dataclass(frozen=True)
class Tuple(Several):
    """Values in brackets: a pair, a point, an interval."""

    opening: str = "("
    closing: str = ")"


@dataclass(frozen=True)
class Matrix(Several):
    """The cells of a matrix, row by row."""

    widths: tuple[int, ...]


@dataclass(frozen=True)
class Call(Several):
    """A function and its arguments."""

    name: str


@dataclass(frozen=True)
class Relation(Several):
    """``a < b <= c``, with the signs between the parts."""

    signs: tuple[str, ...]


@dataclass(frozen=True)
class Based(Tree):
    """A number with its base, as 101_2."""

    digits: str
    base: int


INFINITE, E, IMAGINARY, PI = map(Constant, ("inf", "e", "i", "pi"))
ZERO, ONE = Number(Fraction(0)), Number(Fraction(1))


def walk(tree: Tree) -> Iterator[Tree]:
    """Yield the tree and every tree below it."""
    yield tree
    for child in tree.children():
        yield from walk(child)


def contains(tree: Tree, *kinds: type[Tree]) -> bool:
    """Return True if one of the kinds occurs anywhere in a tree."""
    return any(isinstance(node, kinds) for node in walk(tree))


def names(tree: Tree) -> set[str]:
    """Return the variables of a tree."""
    return {node.name for node in walk(tree) if isinstance(node, Variable)}


def has_names(tree: Tree) -> bool:
    """Return True if a variable occurs anywhere in a tree."""
    return contains(tree, Variable)


def has_loose_names(tree: Tree) -> bool:
    """Return True if a variable occurs outside of functions. ``sin^2 x + cos^2 x`` has none and can be a number."""
    return isinstance(tree, Variable) or (not isinstance(tree, Call) and any(map(has_loose_names, tree.children())))


def rebuilt(tree: Tree, change: Callable[[Tree], Tree]) -> Tree:
    """Return the tree with ``change`` applied to each tree directly below it."""

    def changed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(changed, value))
        return change(value) if isinstance(value, Tree) else value

    return type(tree)(*map(changed, tree.fields()))


def is_infinite(tree: Tree) -> bool:
    """Return True for plus or minus infinity."""
    return tree in (INFINITE, Negative(INFINITE))


def negated(tree: Tree) -> Tree:
    """Return the negated tree. A number stays a number."""
    return Number(-tree.value) if isinstance(tree, Number) else Negative(tree)


def with_sign(tree: Tree, signs: list[str]) -> Tree:
    """Return the tree after a row of signs: - - x is x."""
    return negated(tree) if signs.count("-") % 2 else tree


def joined(kind: type[Several], parts: list[Tree]) -> Tree:
    """Return the only part, or a tree of the kind with all parts."""
    return parts[0] if len(parts) == 1 else kind(tuple(parts))
