r"""A cleaned answer -> a tree. One linear pass with a depth limit; nothing is evaluated.

A tree is a tuple whose first item names its kind:

    ("num", Fraction)  ("var", name)  ("const", "pi" | "e" | "i" | "inf")
    ("add", a, b, ..)  ("mul", a, b, ..)  ("neg", a)  ("div", a, b)  ("pow", a, b)  ("call", name, a, ..)  ("fact", a)
    ("pm", a, b)  a plus or minus b    ("percent", a)  ("degrees", a)  ("base", digits, b)
    ("list", a, ..)  ("tuple", "(", ")", a, ..)  ("set", a, ..)  ("union", a, b, ..)  ("matrix", row, ..)
    ("relation", a, "<", b, "<=", c)  ("ratio", a, b, ..)
    ("both", relation, ..)  joined by "and"    ("either", a, b, ..)  joined by "or"
    ("mod", a, m)  a's residue modulo m

>>> parse(r"\frac12 x")
('mul', ('div', ('num', Fraction(1, 1)), ('num', Fraction(2, 1))), ('var', 'x'))
>>> parse("1 1/2"), parse("1,200")
(('num', Fraction(3, 2)), ('num', Fraction(1200, 1)))

Words are not parsed as products of letters: a word outside the notation makes the text `Unreadable`. So do integrals
and limits, which Math-Verify reads.

Does not evaluate.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from grpo_math.grading.equal.spelled import NUMBER_WORDS, SCALES

Tree = tuple[Any, ...]

MAX_DEPTH = 40
MAX_DIGITS = 4_000
DIGITS = frozenset("0123456789")
ASCII_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


class Unreadable(ValueError):
    """The text is not an expression of this grammar."""


class TooLarge(Unreadable):
    """The text is longer, or nested more deeply, than an answer can be."""


FUNCTION_NAMES = (
    "arcsin arccos arctan arccot sinh cosh tanh sin cos tan cot sec csc log ln lg exp sqrt abs gcd lcm max min "
    "floor ceil"
)
FUNCTIONS = frozenset(FUNCTION_NAMES.split())
INFINITE: Tree = ("const", "inf")
WORDS = {"pi": ("const", "pi"), "infinity": INFINITE, "inf": INFINITE, "infty": INFINITE}
SHORT = (
    "all am an and any are as at be but by can did etc few for from had has he her his how if in is isn it its left "
    "may me my no nor not now odd of off old on one or our out per she six so sum ten the to too two up us via was "
    "way we who why yes yet"
)
SHORT_WORDS = frozenset(SHORT.split())  # longer words are never read as factors
NOT_FACTORS = ("\\cup", "\\cap", "\\pm", "\\mp", "\\ne", "\\in", "\\approx", "\\equiv", "\\}", "\\{", "\\\\", "\\end",
               "\\text", "\\setminus", "\\to", "\\mod", "\\pmod", "\\bmod", "\\ldots", "\\cdots", "\\dots",
               "\\rfloor", "\\rceil")  # fmt: skip
RELATIONS = ("<=", ">=", "!=", "==", "<", ">", "=", "\\ne", "\\in", "\\approx", "\\equiv")
GREEK_NAMES = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar"
)
GREEK = frozenset(GREEK_NAMES.split())
NUMBER = re.compile(
    r"(?:\d{1,3}(?:,\d{3})+(?![\d])|\d{1,3}(?: \d{3})+(?![\d ]*\d)(?! ?/)|\d+(?:_\d{3})*(?!\d*_))(?:\.\d+)?|\.\d+|\d+"
)
THOUSANDS = re.compile(r" *\d{1,3}(?:,\d{3})+ *")
PLAIN = re.compile(r"\d+(?:\.\d+)?|\.\d+")
REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*(?:\{(\d+)\}|(\d))")
EXPONENT = re.compile(r"[eE]([-+]?\d{1,5})(?![\w.])")
MIXED = re.compile(
    r" ?\\frac\s*(?:\{\s*(\d{1,9})\s*\}|(\d))\s*(?:\{\s*(\d{1,9})\s*\}|(\d))| (\d{1,9}) ?/ ?(\d{1,9})(?![\d.])"
)
BASED = re.compile(r"([0-9A-Z]+)\s*_\s*(?:\{\s*(?:\\text\s*\{)?\s*(\d{1,2})\s*\}{1,2}|(\d{1,2})(?!\d))")
LETTERS = re.compile(r"[A-Za-z]+")
COMMAND = re.compile(r"\\([A-Za-z]+)")
CHOOSING = re.compile(r"\(\s*\d+\s*,\s*\d+\s*\)")
SUBSCRIPT = re.compile(
    r"_(?:\{(?![^}]*\b(?:and|or|not|is|never)\b)"
    r"([A-Za-z0-9,.+\-]{1,20}|[A-Za-z ]{1,20}|[A-Za-z0-9]+ ?[,+-] ?[A-Za-z0-9]+)\}|([A-Za-z0-9]))"
)
SCALE = re.compile(rf" {{0,2}}({'|'.join(SCALES)}|hundred)\b")
MATRIX = re.compile(r"\\begin\s*\{([pbvBV]?matrix|array|smallmatrix)\}\s*(?:\{[clr| ]*\})?")


def parse(text: str, thousands: bool = True) -> Tree:
    """Return the tree of a cleaned text. With ``thousands`` false, "1,200" is the list of 1 and 200."""
    reader = _Reader(text, thousands)
    tree = reader.answer()
    reader.skip()
    if reader.at < len(text):
        raise Unreadable(f"cannot read {text[reader.at : reader.at + 20]!r}")
    _check_depth(tree)
    return tree


def _check_depth(tree: Tree) -> None:
    """Raise `TooLarge` for a deep tree, because other functions recurse over it. 3!!!! and 1/1/1/1 nest deeply too."""
    level: list[Tree] = [tree]
    for _ in range(2 * MAX_DEPTH):
        level = [part for parent in level for part in parent if isinstance(part, tuple)]
        if not level:
            return
    raise TooLarge(f"nested more than {2 * MAX_DEPTH} deep")


class _Reader:
    def __init__(self, text: str, thousands: bool) -> None:
        self.text, self.at, self.depth, self.thousands = text, 0, 0, thousands
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

    def deeper(self, read: Callable[[], Tree]) -> Tree:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge(f"nested more than {MAX_DEPTH} deep")
        tree = read()
        self.depth -= 1
        return tree

    # -- lists and relations

    def answer(self) -> Tree:
        items = self.items()
        if len(items) == 1:
            return items[0]
        if self.joined == {"and"} and all(item[0] == "relation" for item in items):
            return ("both", *items)
        return ("either" if self.joined == {"or"} else "list", *items)

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
            self.skip()
            if self.at >= len(self.text):
                raise Unreadable("a list ends in a comma")
            items.append(self.relation())

    def relation(self) -> Tree:
        tree = self.bare_relation()
        if not self.take("\\pmod"):
            return tree
        self.skip()
        return self.congruence(tree, self.argument())

    def congruence(self, tree: Tree, modulus: Tree) -> Tree:
        r"""``a \equiv b \pmod m`` -> ``a \bmod m = b``, with b reduced."""
        if tree[0] != "relation" or tree[2::2] != ("=",):
            raise Unreadable("a modulus without its congruence")
        residue = tree[3]
        if residue[0] == modulus[0] == "num" and modulus[1] > 0:
            residue = ("num", residue[1] % modulus[1])
        return ("relation", ("mod", tree[1], modulus), "=", residue)

    def bare_relation(self) -> Tree:
        parts: list[Any] = [self.sum()]
        while sign := self.take(":", "\\cup", "U", *RELATIONS):
            if sign in (":", "\\cup", "U"):
                kind, right, left = "ratio" if sign == ":" else "union", self.sum(), parts.pop()
                if kind == "union" and "mul" in (left[0], right[0]):
                    raise Unreadable("a product in a union")
                parts.append((kind, *left[1:], right) if left[0] == kind else (kind, left, right))
            else:
                parts += [{"\\ne": "!=", "==": "=", "\\in": "in", "\\approx": "~", "\\equiv": "="}.get(sign, sign)]
                parts.append(self.sum())
        return parts[0] if len(parts) == 1 else ("relation", *parts)

    # -- arithmetic

    def sum(self) -> Tree:
        negative = plus_minus = False
        while (sign := self.take("+", "-", "\\pm", "\\mp")) is not None:
            negative ^= sign == "-"
            plus_minus |= sign in ("\\pm", "\\mp")
        total = negated(self.product()) if negative else self.product()
        terms = [("pm", ("num", Fraction(0)), total) if plus_minus else total]
        while (sign := self.take("+", "-", "\\pm", "\\mp")) is not None:
            negative = sign == "-"
            while (more := self.take("+", "-")) is not None:
                negative ^= more == "-"
            term = self.product()
            if sign in ("\\pm", "\\mp"):
                left = terms[0] if len(terms) == 1 else ("add", *terms)
                terms = [("pm", left, term)]
            else:
                terms.append(negated(term) if negative else term)
        kinds = {part[0] for part in terms}
        if "num" in kinds and "tuple" in kinds:
            raise Unreadable("a number next to a pair")
        return terms[0] if len(terms) == 1 else ("add", *terms)

    def product(self) -> Tree:
        factors = [self.power()]
        while True:
            if self.take("*"):
                factors.append(self.signed())
            elif self.take("\\bmod"):
                left = factors.pop() if len(factors) == 1 else ("mul", *factors)
                factors = [("mod", left, self.signed())]
            elif self.take("/"):
                below = self.signed()
                above = factors.pop() if len(factors) == 1 else ("mul", *factors)
                factors = [("div", above, below)]
            elif self.starts_factor():
                if (self.text[self.at] in DIGITS or self.text[self.at] == ".") and factors[-1][0] != "pow":
                    raise Unreadable("two numbers side by side")
                factors.append(self.power())
            else:
                break
        return factors[0] if len(factors) == 1 else ("mul", *factors)

    def signed(self) -> Tree:
        negative = False
        while (sign := self.take("+", "-")) is not None:
            negative ^= sign == "-"
        value = self.power()
        return negated(value) if negative else value

    def starts_factor(self) -> bool:
        self.skip()
        if self.at >= len(self.text):
            return False
        char = self.text[self.at]
        if char in ASCII_LETTERS:
            return self.peek("and", "or", "U") is None
        if char == "\\":
            return self.peek(*NOT_FACTORS) is None
        return char in DIGITS or char in ".({" or (char == "|" and self.bars == 0)

    def power(self) -> Tree:
        base = self.atom()
        while True:
            if self.peek("!=") is None and self.take("!"):
                base = ("fact", base)
            elif self.take("°"):
                base = ("degrees", base)
            elif self.take("%"):
                base = ("percent", base)
            elif self.take("^", "**"):
                base = ("pow", base, self.exponent())
            else:
                break
        return base

    def exponent(self) -> Tree:
        return self.deeper(self.signed_exponent)

    def signed_exponent(self) -> Tree:
        if self.peek("{"):
            return self.group()
        if self.take("-"):
            return negated(self.exponent())
        number = self.match(PLAIN)
        tree = self.atom() if number is None else ("num", _number(number.group()))
        return ("pow", tree, self.exponent()) if self.take("^", "**") else tree

    def group(self) -> Tree:
        """Read an expression in braces."""
        self.need("{")
        return self.deeper(self.in_braces)

    def in_braces(self) -> Tree:
        inner = self.sum()
        if self.take("\\over"):
            inner = ("div", inner, self.sum())
        self.need("}")
        return inner

    def braces(self) -> Tree:
        """Read braces that are not an argument: a group, or a set without backslashes."""
        start, depth = self.at, self.depth
        try:
            return self.group()
        except TooLarge:
            raise
        except Unreadable:
            self.reread += self.at - start
            self.at, self.depth = start + 1, depth
            if self.reread > 400:
                raise
            return self.members("}")

    def members(self, closing: str) -> Tree:
        """Read the members of a set."""
        items = self.items()
        self.need(closing)
        return ("set", *items)

    def argument(self) -> Tree:
        r"""Read an argument of \frac or \sqrt: braces, or one digit, letter or command."""
        if self.peek("{"):
            return self.group()
        char = self.text[self.at : self.at + 1]
        if char in DIGITS:
            self.at += 1
            return ("num", Fraction(int(char)))
        if char in ASCII_LETTERS:
            self.at += 1
            return _letter(char)
        return self.atom()

    def atom(self) -> Tree:
        return self.deeper(self.bare_atom)

    def bare_atom(self) -> Tree:
        self.skip()
        if self.at >= len(self.text):
            raise Unreadable("an operand is missing")
        char = self.text[self.at]
        if char in DIGITS or char == ".":
            return self.number()
        if char in "([":
            return self.brackets()
        if char == "{":
            return self.braces()
        if char == "|":
            self.at += 1
            self.bars += 1
            inner = self.sum()
            self.bars -= 1
            self.need("|")
            return ("call", "abs", inner)
        if char == "\\":
            return self.command()
        letters = self.match(LETTERS)
        if letters is None:
            raise Unreadable(f"cannot read {char!r}")
        return self.word(letters.group())

    def number(self) -> Tree:
        repeating = self.match(REPEATING)
        if repeating is not None:
            whole, fixed, cycle = repeating[1], repeating[2], repeating[3] or repeating[4]
            value = Fraction(int(whole + fixed or "0"), 10 ** len(fixed))
            return ("num", value + Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed)))
        based = self.match(BASED)
        if based is not None:
            return ("base", based[1], int(based[2] or based[3]))
        number = self.match(NUMBER if self.thousands else PLAIN)
        if number is None:
            raise Unreadable("a lone point")
        digits = number.group()
        value = _number(digits)
        exponent = self.match(EXPONENT)
        if exponent is not None:
            if len(digits) + abs(int(exponent[1])) > MAX_DIGITS:
                raise TooLarge(f"a number of more than {MAX_DIGITS} digits")
            return ("num", value * Fraction(10) ** int(exponent[1]))
        if "." not in digits:
            mixed = self.match(MIXED)
            if mixed is not None:
                above = int(mixed[1] or mixed[2] or mixed[5])
                below = int(mixed[3] or mixed[4] or mixed[6])
                if below == 0 or above >= below:
                    raise Unreadable("a mixed number whose fraction is 1 or more")
                return ("num", value + Fraction(above, below))
        scale = self.match(SCALE)
        return ("num", value * SCALES.get(scale[1], 100)) if scale is not None else ("num", value)

    def brackets(self) -> Tree:
        start, opening = self.at, self.text[self.at]
        self.at += 1
        outer_bars, self.bars = self.bars, 0
        items = self.items()
        closing = self.need(")", "]")
        self.bars = outer_bars
        if self.thousands and THOUSANDS.fullmatch(self.text, start + 1, self.at - 1):
            raise Unreadable("a pair, or a number with separators in brackets")
        if len(items) == 1 and opening + closing in ("()", "[]"):
            return items[0]
        return ("tuple", opening, closing, *items)

    def command(self) -> Tree:
        if self.take("\\{"):
            if self.take("\\}"):
                return ("set",)
            return self.members("\\}")
        if self.peek("\\begin"):
            return self.matrix()
        command = self.match(COMMAND)
        if command is None:
            raise Unreadable("a stray backslash")
        name = command[1]
        if name in ("frac", "binom", "dbinom", "tbinom"):
            kind = ("div",) if name == "frac" else ("call", "binom")
            return (*kind, self.argument(), self.argument())
        if name == "sqrt":
            degree: Tree | None = None
            if self.take("["):
                degree = self.sum()
                self.need("]")
            inside = self.argument() if not self.peek("(") else self.atom()
            if degree is None:
                return ("call", "sqrt", inside)
            return ("pow", inside, ("div", ("num", Fraction(1)), degree))
        if name in ("pi", "infty", "emptyset"):
            return WORDS.get(name, ("set",))
        if name in ("lfloor", "lceil"):
            inner = self.sum()
            self.need("\\rfloor" if name == "lfloor" else "\\rceil")
            return ("call", "floor" if name == "lfloor" else "ceil", inner)
        if name in ("overline", "bar", "hat", "tilde"):
            start = self.at
            if not _names_only(self.argument()) or re.search("[a-z]{3}", self.text[start : self.at]):
                raise Unreadable(f"\\{name} over more than letters")
            return ("var", name + self.text[start : self.at].strip())
        if name in FUNCTIONS:
            return self.call(name)
        if name in GREEK:
            return self.named(name)
        raise Unreadable(f"\\{name} is not of this grammar")

    def call(self, name: str) -> Tree:
        power: Tree | None = None
        base: Tree | None = None
        while True:
            if power is None and self.take("^"):
                power = self.exponent()
            elif base is None and self.take("_"):
                base = self.argument()
            else:
                break
        if self.peek("("):
            inner = self.atom()
            arguments = list(inner[3:]) if inner[0] == "tuple" else [inner]
        else:
            factors: list[Tree] = []
            while True:
                self.skip()
                if factors and self.peek("\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc", "\\ln", "\\log", "("):
                    break
                factors.append(self.power())
                if not self.starts_factor() or self.text[self.at] in DIGITS:
                    break
            arguments = [factors[0] if len(factors) == 1 else ("mul", *factors)]
        if name == "log" and base is not None:
            arguments = [*arguments, base]
        if power == ("num", Fraction(-1)) and name in ("sin", "cos", "tan"):
            return ("call", "arc" + name, *arguments)
        tree: Tree = ("call", {"lg": "log"}.get(name, name), *arguments)
        return tree if power is None else ("pow", tree, power)

    def word(self, word: str) -> Tree:
        """Return the tree of the letters just read. If they are factors, read only the first letter."""
        lower = word.lower()
        if lower in WORDS:
            return WORDS[lower]
        if lower in FUNCTIONS:
            if lower == "sqrt" and not self.peek("(", "{"):
                raise Unreadable("sqrt without its argument")
            if lower == "sqrt" and self.peek("{"):
                return ("call", "sqrt", self.group())
            return self.call(lower)
        if word in ("C", "P") and CHOOSING.match(self.text, self.at):
            return ("call", "binom" if word == "C" else "perm", *self.atom()[3:])
        if (lower in SHORT_WORDS and (not word.isupper() or lower in ("and", "or", "not"))) or lower in NUMBER_WORDS:
            raise Unreadable(f"{word[:20]!r} is a word")
        if len(word) > 1 and word.isupper():  # a segment, an ordering or a word: not a product of letters
            return self.named(word)
        self.at -= len(word) - 1  # letters that are factors: read the first
        if len(word) > 3:
            raise Unreadable(f"{word[:20]!r} is a word")
        return self.named(word[0])

    def named(self, name: str) -> Tree:
        subscript = self.match(SUBSCRIPT)
        primes = ""
        while self.text.startswith("'", self.at):
            self.at += 1
            primes += "'"
        if subscript is not None:
            return ("var", f"{name}_{(subscript[1] or subscript[2]).replace(' ', '')}{primes}")
        return ("var", name + primes) if primes or len(name) > 1 else _letter(name)

    def matrix(self) -> Tree:
        environment = self.match(MATRIX)
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
        matrix: Tree = ("matrix", *(tuple(row) for row in rows))
        return ("call", "det", matrix) if environment[1] in ("vmatrix", "Vmatrix") else matrix


def _number(digits: str) -> Fraction:
    digits = digits.replace(",", "").replace(" ", "").replace("_", "")
    return Fraction(digits)


def _names_only(tree: Tree) -> bool:
    """Return True for letters and digits with at least one letter, as under the bar of a segment or of a number."""
    parts = tree[1:] if tree[0] == "mul" else (tree,)
    return any(p[0] != "num" for p in parts) and all(
        p[0] in ("var", "num") or p in (("const", "e"), ("const", "i")) for p in parts
    )


def negated(tree: Tree) -> Tree:
    """Return the negated tree. A number stays a number."""
    return ("num", -tree[1]) if tree[0] == "num" else ("neg", tree)


def _letter(char: str) -> Tree:
    return ("const", char) if char in "ei" else ("var", char)
