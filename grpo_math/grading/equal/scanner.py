r"""A position in the text that is parsed: reads the next token or number there.

>>> Scanner("1 1/2", True).number(), Scanner("<= 3", True).take("<", "<=")
(Number(value=Fraction(3, 2)), '<')
"""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from grpo_math.grading.equal import notation
from grpo_math.grading.equal.tree import IMAGINARY, Based, Constant, E, Number, Product, Tree, Variable

MAX_DEPTH = 40
MAX_DIGITS = 4_000


class Unreadable(ValueError):
    """The text is not an expression of this grammar."""


class TooLarge(Unreadable):
    """The text is longer, or nested more deeply, than an answer can be."""


def deeper(read: Callable[[Any], Tree]) -> Callable[[Any], Tree]:
    """Limit how deep the method of a `Scanner` may call itself."""

    def limited(scanner: "Scanner") -> Tree:
        scanner.depth += 1
        if scanner.depth > MAX_DEPTH:
            raise TooLarge(f"nested more than {MAX_DEPTH} deep")
        tree = read(scanner)
        scanner.depth -= 1
        return tree

    return limited


class Scanner:
    """A text, a position in it, and the limits of one pass."""

    def __init__(self, text: str, thousands: bool) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.thousands = thousands
        self.bars = 0
        self.joined: set[str | None] = set()  # the words between the members of the last list
        self.reread = 0  # characters in braces that were read twice; limited, so that the pass stays linear

    # -- characters

    def skip(self) -> None:
        while self.text.startswith(" ", self.at):
            self.at += 1

    def peek(self, *options: str) -> str | None:
        """Return the first option at this position. A letter must not follow an option that ends in a letter."""
        self.skip()
        for option in options:
            if self.text.startswith(option, self.at):
                end = self.at + len(option)
                if option[-1].isalpha() and end < len(self.text) and self.text[end].isalpha():
                    continue
                return option
        return None

    def take(self, *options: str) -> str | None:
        option = self.peek(*options)
        if option is not None:
            self.at += len(option)
        return option

    def take_all(self, *options: str) -> list[str]:
        """Take every option that follows, and return them in order."""
        taken = []
        while option := self.take(*options):
            taken.append(option)
        return taken

    def need(self, *options: str) -> str:
        option = self.take(*options)
        if option is None:
            raise Unreadable(f"{options[0]!r} is missing")
        return option

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
        return match

    def number(self) -> Tree:
        repeating = self.match(notation.REPEATING)
        if repeating is not None:
            whole, fixed, cycle = repeating[1], repeating[2], repeating[3] or repeating[4]
            value = Fraction(int(whole + fixed or "0"), 10 ** len(fixed))
            return Number(value + Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed)))
        based = self.match(notation.BASED)
        if based is not None:
            return Based(based[1], int(based[2] or based[3]))
        number = self.match(notation.NUMBER if self.thousands else notation.PLAIN)
        if number is None:
            raise Unreadable("a lone point")
        digits = number.group()
        value = read_number(digits)
        exponent = self.match(notation.EXPONENT)
        if exponent is not None:
            if len(digits) + abs(int(exponent[1])) > MAX_DIGITS:
                raise TooLarge(f"a number of more than {MAX_DIGITS} digits")
            return Number(value * Fraction(10) ** int(exponent[1]))
        if "." not in digits:
            mixed = self.match(notation.MIXED)
            if mixed is not None:
                above = int(mixed[1] or mixed[2] or mixed[5])
                below = int(mixed[3] or mixed[4] or mixed[6])
                if below == 0 or above >= below:
                    raise Unreadable("a mixed number whose fraction is 1 or more")
                return Number(value + Fraction(above, below))
        scale = self.match(notation.SCALE)
        return Number(value if scale is None else value * notation.SCALES.get(scale[1], 100))


def read_number(digits: str) -> Fraction:
    """Return a number in digits, with or without separators."""
    return Fraction(re.sub("[, _]", "", digits))


def check_depth(tree: Tree) -> None:
    """Raise `TooLarge` for a deep tree, because other functions recurse over it. 3!!!! and 1/1/1/1 nest deeply too."""
    level: list[Tree] = [tree]
    for _ in range(2 * MAX_DEPTH):
        level = [part for parent in level for part in parent.children()]
        if not level:
            return
    raise TooLarge(f"nested more than {2 * MAX_DEPTH} deep")


def names_only(tree: Tree) -> bool:
    """Return True for letters and digits with at least one letter, as under the bar of a segment or of a number."""
    parts = tree.parts if isinstance(tree, Product) else (tree,)
    named = [part in (E, IMAGINARY) or isinstance(part, Variable) for part in parts]
    return any(named) and all(name or isinstance(part, Number) for name, part in zip(named, parts, strict=True))


def letter(char: str) -> Tree:
    """Return the tree of a single letter."""
    return (Constant if char in "ei" else Variable)(char)
