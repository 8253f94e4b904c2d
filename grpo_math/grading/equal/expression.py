r"""A cleaned answer -> a tree. One linear pass with a depth limit; nothing is evaluated.

>>> parse(r"\frac12 x") == Product((Quotient(Number(Fraction(1)), Number(Fraction(2))), Variable("x")))
True
>>> parse("1 1/2"), parse("1,200")
(Number(value=Fraction(3, 2)), Number(value=Fraction(1200, 1)))

Words are not parsed as products of letters: a word outside the notation makes the text `Unreadable`. So do integrals
and limits, which Math-Verify reads.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from itertools import chain

from grpo_math.grading.equal import notation
from grpo_math.grading.equal.notation import ASCII_LETTERS, DIGITS
from grpo_math.grading.equal.scanner import (
    Scanner,
    TooLarge,
    Unreadable,
    check_depth,
    deeper,
    letter,
    names_only,
    read_number,
)
from grpo_math.grading.equal.tree import (
    ONE,
    ZERO,
    Both,
    Call,
    Degrees,
    Either,
    Factorial,
    List,
    Matrix,
    MinusPlus,
    Number,
    Percent,
    PlusMinus,
    Power,
    Product,
    Quotient,
    Ratio,
    Relation,
    Residue,
    Set,
    Single,
    Sum,
    Tree,
    Tuple,
    Union,
    Variable,
    joined,
    negated,
    with_sign,
)  # fmt: skip


def parse(text: str, thousands: bool = True) -> Tree:
    """Return the tree of a cleaned text. With ``thousands`` false, "1,200" is the list of 1 and 200."""
    reader = _Reader(text, thousands)
    tree = reader.answer()
    reader.skip()
    if reader.at < len(text):
        raise Unreadable(f"cannot read {text[reader.at : reader.at + 20]!r}")
    check_depth(tree)
    return tree


SUFFIXES: dict[str, type[Single]] = {"!": Factorial, "°": Degrees, "%": Percent}


class _Reader(Scanner):
    # -- lists and relations

    def answer(self) -> Tree:
        items = self.items()
        if self.joined == {"and"} and all(isinstance(item, Relation) for item in items):
            return joined(Both, items)
        return joined(Either if self.joined == {"or"} else List, items)

    def items(self) -> list[Tree]:
        items = [self.relation()]
        joined: set[str | None] = set()
        while True:
            if self.take(",", ";"):
                joined.add(self.take("and", "or", "&&"))
            elif sign := self.take("and", "or", "&&"):
                joined.add(sign)
            else:
                self.joined = joined
                return items
            items.append(self.relation())

    def relation(self) -> Tree:
        tree = self.bare_relation()
        return self.congruence(tree, self.argument()) if self.take("\\pmod") else tree

    def congruence(self, tree: Tree, modulus: Tree) -> Tree:
        r"""``a \equiv b \pmod m`` -> ``a \bmod m = b``, with b reduced."""
        match tree:
            case Relation((value, residue), ("=",)):
                if isinstance(residue, Number) and isinstance(modulus, Number) and modulus.value > 0:
                    residue = Number(residue.value % modulus.value)
                return Relation((Residue(value, modulus), residue), ("=",))
        raise Unreadable("a modulus without its congruence")

    def bare_relation(self) -> Tree:
        parts, signs = [self.sum()], []
        while sign := self.take(":", "\\cup", "U", *notation.RELATIONS):
            right = self.sum()
            if sign in (":", "\\cup", "U"):
                parts.append(self.chained(Ratio if sign == ":" else Union, parts.pop(), right))
            else:
                signs.append(notation.SIGNS.get(sign, sign))
                parts.append(right)
        return Relation(tuple(parts), tuple(signs)) if signs else parts[0]

    def chained(self, kind: type[Ratio | Union], left: Tree, right: Tree) -> Tree:
        if kind is Union and (isinstance(left, Product) or isinstance(right, Product)):
            raise Unreadable("a product in a union")
        return kind((*left.parts, right)) if isinstance(left, kind) else kind((left, right))

    # -- arithmetic

    def sum(self) -> Tree:
        terms: list[Tree] = []
        while not terms or self.peek(*notation.PLUS):
            signs = self.take_all(*notation.PLUS)
            term = with_sign(self.product(), signs)
            if "\\pm" in signs or "\\mp" in signs:
                terms = [(MinusPlus if "\\mp" in signs else PlusMinus)(joined(Sum, terms or [ZERO]), term)]
            else:
                terms.append(term)
        if {Number, Tuple} <= set(map(type, terms)):
            raise Unreadable("a number next to a pair")
        return joined(Sum, terms)

    def product(self) -> Tree:
        factors = [self.power()]
        while True:
            if self.take("*"):
                factors.append(self.signed())
            elif self.take("\\bmod", "\\mod"):
                factors = [Residue(joined(Product, factors), self.signed())]
            elif self.take("/"):
                factors = [Quotient(joined(Product, factors), self.signed())]
            elif self.starts_factor():
                if (self.text[self.at] in DIGITS or self.text[self.at] == ".") and not (
                    isinstance(factors[-1], Power | Factorial) or notation.COEFFICIENT_POWER.match(self.text, self.at)
                ):
                    raise Unreadable("two numbers side by side")
                factors.append(self.power())
            else:
                break
        return joined(Product, factors)

    def signed(self) -> Tree:
        signs = self.take_all("+", "-")
        return with_sign(self.power(), signs)

    def starts_factor(self) -> bool:
        self.skip()
        if self.at >= len(self.text):
            return False
        char = self.text[self.at]
        if char in ASCII_LETTERS:
            return self.peek("and", "or", "U") is None
        if char == "\\":
            return self.peek(*notation.NOT_FACTORS) is None
        return char in DIGITS or char in ".({" or (char == "|" and self.bars == 0)

    def power(self) -> Tree:
        base = self.atom()
        while True:
            # A double factorial cannot be read.
            if self.peek("!=", "!!") is None and (sign := self.take(*SUFFIXES)):
                base = SUFFIXES[sign](base)
            elif self.take("^", "**"):
                base = Power(base, self.exponent())
            else:
                return base

    @deeper
    def exponent(self) -> Tree:
        if self.peek("{"):
            return self.group()
        if self.take("-"):
            return negated(self.exponent())
        number = self.match(notation.PLAIN)
        tree = self.atom() if number is None else Number(read_number(number.group()))
        return Power(tree, self.exponent()) if self.take("^", "**") else tree

    @deeper
    def group(self) -> Tree:
        """Read an expression in braces."""
        self.need("{")
        inner = self.sum()
        if self.take("\\over"):
            inner = Quotient(inner, self.sum())
        self.need("}")
        return inner

    def braces(self) -> Tree:
        """Read braces that are not an argument: a group, or a set without backslashes."""
        start, depth = self.at, self.depth
        try:
            return self.group()
        except Unreadable as error:
            self.reread += self.at - start
            if isinstance(error, TooLarge) or self.reread > 400:
                raise
            self.at = start + 1
            self.depth = depth
            return self.members("}")

    def members(self, closing: str) -> Tree:
        """Read the members of a set."""
        items = self.items()
        self.need(closing)
        return Set(tuple(items))

    def argument(self) -> Tree:
        r"""Read an argument of \frac or \sqrt: braces, or one digit, letter or command."""
        if self.peek("{"):
            return self.group()
        char = self.text[self.at : self.at + 1]
        if char not in DIGITS | ASCII_LETTERS:
            return self.atom()
        self.at += 1
        return Number(Fraction(int(char))) if char in DIGITS else letter(char)

    @deeper
    def atom(self) -> Tree:
        self.skip()
        if self.at >= len(self.text):
            raise Unreadable("an operand is missing")
        char = self.text[self.at]
        if char in DIGITS or char == ".":
            return self.number()
        if char in "([]":
            return self.brackets()
        if char == "{":
            return self.braces()
        if char == "|":
            self.at += 1
            self.bars += 1
            inner = self.sum()
            self.bars -= 1
            self.need("|")
            return Call((inner,), "abs")
        if char == "\\":
            return self.command()
        letters = self.match(notation.LETTERS)
        if letters is None:
            raise Unreadable(f"cannot read {char!r}")
        return self.word(letters.group())

    def brackets(self) -> Tree:
        start, opening = self.at, self.text[self.at].replace("]", "(")  # ]1, 5[ is (1, 5)
        self.at += 1
        outer_bars = self.bars
        self.bars = 0
        items = self.items()
        closing = self.need(")", "]", "[").replace("[", ")")
        self.bars = outer_bars
        if self.thousands and notation.THOUSANDS.fullmatch(self.text, start + 1, self.at - 1):
            raise Unreadable("a pair, or a number with separators in brackets")
        if len(items) == 1 and opening + closing in ("()", "[]"):
            return items[0]
        return Tuple(tuple(items), opening, closing)

    def command(self) -> Tree:
        if self.take("\\{"):
            return Set(()) if self.take("\\}") else self.members("\\}")
        if self.peek("\\begin"):
            return self.matrix()
        command = self.match(notation.COMMAND)
        if command is None:
            raise Unreadable("a stray backslash")
        name = command[1]
        if read := COMMANDS.get(name):
            return read(self, name)
        if name not in notation.GREEK:
            raise Unreadable(f"\\{name} is not of this grammar")
        return self.named(name)

    def fraction(self, name: str) -> Tree:
        return Quotient(self.argument(), self.argument())

    def binomial(self, name: str) -> Tree:
        return Call((self.argument(), self.argument()), "binom")

    def root(self, name: str) -> Tree:
        if not self.take("["):
            return Call((self.argument(),), "sqrt")
        degree = self.sum()
        self.need("]")
        return Power(self.argument(), Quotient(ONE, degree))

    def constant(self, name: str) -> Tree:
        return notation.WORDS.get(name, Set(()))

    def rounded(self, name: str) -> Tree:
        inner = self.sum()
        self.need("\\rfloor" if name == "lfloor" else "\\rceil")
        return Call((inner,), "floor" if name == "lfloor" else "ceil")

    def accented(self, name: str) -> Tree:
        start = self.at
        if not names_only(self.argument()) or re.search("[a-z]{3}", self.text[start : self.at]):
            raise Unreadable(f"\\{name} over more than letters")
        return Variable(name + self.text[start : self.at].strip())

    def matrix(self) -> Tree:
        """Read a matrix, or a determinant."""
        environment = self.match(notation.MATRIX)
        if environment is None:
            raise Unreadable("an environment that is no matrix")
        rows: list[list[Tree]] = [[self.sum()]]
        while sign := self.take("&", "\\\\"):
            if sign == "&":
                rows[-1].append(self.sum())
            elif self.peek("\\end"):
                break
            else:
                rows.append([self.sum()])
        self.need("\\end")
        self.need("{" + environment[1] + "}")
        matrix = Matrix(tuple(chain(*rows)), tuple(map(len, rows)))
        return Call((matrix,), "det") if environment[1] in ("vmatrix", "Vmatrix") else matrix

    def call(self, name: str) -> Tree:
        name = notation.ALIASES.get(name, name)
        power = self.exponent() if self.take("^") else None
        base = self.argument() if self.take("_") else None
        power = self.exponent() if power is None and self.take("^") else power
        if self.peek("("):
            inner = self.atom()
            arguments = inner.parts if isinstance(inner, Tuple) else (inner,)
        else:
            factors = [self.power()]
            # "\sin 2(x + 1)" has the argument 2(x + 1), and "\ln 2(x + 1)" is a product.
            takes_bracket = isinstance(factors[0], Number) and name in ("sin", "cos", "tan")
            following = notation.NEXT if takes_bracket else (*notation.NEXT, "(")
            while self.starts_factor() and self.text[self.at] not in DIGITS and not self.peek(*following):
                factors.append(self.power())
            arguments = (joined(Product, factors),)
        if name == "log" and base is not None:
            arguments = (*arguments, base)
        if power == Number(Fraction(-1)) and "arc" + name in notation.FUNCTIONS:
            return Call(arguments, "arc" + name)
        tree = Call(arguments, name)
        return tree if power is None else Power(tree, power)

    def word(self, word: str) -> Tree:
        """Return the tree of the letters just read. If they are factors, read only the first letter."""
        lower = word.lower()
        if lower in notation.WORDS:
            return notation.WORDS[lower]
        if lower in notation.FUNCTIONS or (lower in notation.ALIASES and len(lower) > 3):
            if lower != "sqrt":
                return self.call(lower)
            if not self.peek("{", "("):
                raise Unreadable("sqrt without its argument")
            return Call((self.argument(),), "sqrt")
        if word in ("C", "P") and notation.CHOOSING.match(self.text, self.at):
            return Call(tuple(self.atom().children()), "binom" if word == "C" else "perm")
        if (
            lower in notation.SHORT_WORDS and (not word.isupper() or lower in ("and", "or", "not"))
        ) or lower in notation.NUMBER_WORDS:
            raise Unreadable(f"{word[:20]!r} is a word")
        if len(word) > 1 and word.isupper():  # a segment, an ordering or a word: not a product of letters
            return self.named(word)
        if len(word) > 3 and word in notation.GREEK:
            return self.named(word)
        self.at -= len(word) - 1  # letters that are factors: read the first
        if len(word) > 3:
            raise Unreadable(f"{word[:20]!r} is a word")
        return self.named(word[0])

    def named(self, name: str) -> Tree:
        subscript = self.match(notation.SUBSCRIPT)
        primes = ""
        while self.text.startswith("'", self.at):
            self.at += 1
            primes += "'"
        if subscript is not None:
            return Variable(f"{name}_{(subscript[1] or subscript[2]).replace(' ', '')}{primes}")
        return Variable(name + primes) if primes or len(name) > 1 else letter(name)


# The method that reads what follows a command, by the command's name.
COMMANDS: dict[str, Callable[[_Reader, str], Tree]] = {
    **dict.fromkeys((*notation.FUNCTIONS, *notation.ALIASES), _Reader.call),
    "frac": _Reader.fraction,
    **dict.fromkeys(("binom", "dbinom", "tbinom"), _Reader.binomial),
    "sqrt": _Reader.root,
    **dict.fromkeys(("pi", "infty", "emptyset"), _Reader.constant),
    **dict.fromkeys(("lfloor", "lceil"), _Reader.rounded),
    **dict.fromkeys(("overline", "bar", "hat", "tilde"), _Reader.accented),
}
