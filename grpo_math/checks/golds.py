r"""The reading of a gold answer, its damage, and the plain number that a model would write for it.

>>> golds = ["49,5", "65.990 €", "93 Äpfel", "(B)", "x^2", "ein Quadrat"]
>>> [reading(gold) for gold in golds]
['expression', 'number', 'number', 'choice', 'expression', 'text']
>>> [plain(gold, decimal_commas(golds)) for gold in golds[:4]]
['49.5', '65990', '93', 'B']
"""

import re
from collections.abc import Mapping, Sequence

from grpo_math.grading import Verdict
from grpo_math.grading.equal.compare import compare, value
from grpo_math.grading.equal.text import repaired
from grpo_math.grading.lexicon import CHOICE, CIRCLED, CODES, CURRENCIES

# Most gold answers of word problems. They have no fault and need no grader.
WHOLE_NUMBER = re.compile(r"-?[0-9]{1,15}")
# Control characters left by a lost backslash, an end in a sign that needs more, and a label of the solution.
DAMAGE = re.compile(r"[\x00-\x08\x0b-\x1f]|[\^_\\]\s*\Z|(?i:\A\W*(?:\\text\{\s*)?answer\s*:)")
DAMAGED = "damaged (a lost backslash, or a label)"
MIXED = re.compile(r"(\d{1,9})\s*\((\d{1,9})/(\d{1,9})\)")  # as in Math23K
# A gold answer that is a choice, with the text of its option or without.
ONE_CHOICE = re.compile(
    rf"(?i:(?:the )?(?:correct )?(?:option|choice|answer)(?: is)?\s*)?\W*\b({CHOICE})(?:\W*|\)(?![,;/]).*|[.:]\s.*)"
    rf"|[^\d{CIRCLED}]*([{CIRCLED}])[^{CIRCLED}]*",
    re.DOTALL,
)
MONEY = re.compile(
    rf"(?<![^\W\d_])(?:[A-Za-z]{{1,3}}(?=[{CURRENCIES}])|(?:{CODES}|zł|Kč|Ft|kr|lei|Rp|Rs|RM|Fr|S/)(?![^\W\d_])\.?)"
    rf"|[{CURRENCIES}]"
)
QUOTED = re.compile(r"""[\[\s]*["']([^"'\[\]]+)["'][\]\s]*""")
# One number among words, with or without marks between its thousands. 2s may be a product.
NUMBER = re.compile(
    r"(?<![A-Za-z\d.,])-?(?=[.,]?\d)(?:\d{1,3}(?:(?P<mark>[.,'\u00a0\u202f ])\d{3})(?:(?P=mark)\d{3})*|\d*)"
    r"(?:[.,]\d+)?(?![.,]?\d|[A-Za-z])"
)
AROUND = re.compile(r"(?:[A-Za-z]{2,}+|[^\W\d_A-Za-z]|(?<=\s)[A-Za-z]\Z|[\s.,:;!?'\"“”„«»%°。，：！？])*")
PARTS = re.compile(r"\(([^()]*)\)\s*\Z|;|,\s|\bor\b")
COMMA = re.compile(r"\d,\d{1,2}(?!\d)|\.\d{3},\d")
POINT = re.compile(r"\d\.\d{1,2}(?!\d)|,\d{3}\.\d")
VARIABLES = re.compile(r"(?<![A-Za-z])[A-Za-z]{1,2}(?![A-Za-z])")
FEW = 4  # words of a gold answer that are tried
# Two letters of a script without spaces count as a word.
WORD = re.compile(r"(?<![\\A-Za-z])(?:[⺀-鿿぀-ヿ]{2}|(?:(?![⺀-鿿぀-ヿ])[^\W\d_]){2,})")


def is_damaged(gold: str) -> bool:
    return repaired(gold) != gold or DAMAGE.search(gold) is not None


def words(gold: str) -> list[str]:
    r"""Return the words of a gold answer outside of its formulas.

    >>> words(r"the \frac{1}{2} of $ab$ and \text{ cm}")
    ['the', 'of', 'and', 'cm']
    """
    return WORD.findall(re.sub(r"\\(?:begin|end)\{\w+\*?\}|\\[A-Za-z]+|\$[^$]*\$", " ", gold.replace("\\text", "")))


def reading(gold: str) -> str:
    """Return "number", "expression", "choice" or "text"."""
    if ONE_CHOICE.fullmatch(gold):
        return "choice"
    if value(gold) is not None:
        return "number"
    return "text" if words(gold) else "expression"


def readings(golds: Sequence[str]) -> dict[str, list[str]]:
    """Return the gold answers by what they are read as, the commonest first."""
    by_reading: dict[str, list[str]] = {}
    for gold in map(repaired, golds):
        by_reading.setdefault(reading(gold), []).append(gold)
    return dict(sorted(by_reading.items(), key=lambda item: -len(item[1])))


def in_words(read: Mapping[str, Sequence[str]]) -> str:
    """Return the counts of `readings`, each with three gold answers.

    >>> in_words(readings(["28", "23", "x^2"]))
    "2 as a number ('28' = 28, '23' = 23), 1 as an expression ('x^2')"
    """
    parts = []
    for name, some in read.items():
        shown = [
            repr(gold[:60]) + ("" if (number := value(gold)) is None else f" = {str(number)[:60]}") for gold in some[:3]
        ]
        parts.append(f"{len(some):,} as {'an' if name == 'expression' else 'a'} {name} ({', '.join(shown)})")
    return ", ".join(parts).replace("as a text", "as text")


def decimal_commas(golds: Sequence[str]) -> bool:
    """Return True if these gold answers have decimal commas: more of them than decimal points."""
    numbers = [number for gold in golds if not WHOLE_NUMBER.fullmatch(gold) and (number := _one_number(gold))]
    return sum(bool(COMMA.search(one)) for one in numbers) > sum(bool(POINT.search(one)) for one in numbers)


def plain(gold: str, commas: bool = False) -> str:
    r"""Return the plain number, letter or text that a model would write for a gold answer.

    ``commas``: a comma is decimal, and a point separates thousands.

    >>> plain("1(1/2)"), plain('["7"]'), plain("(B) 12 cm"), plain("x^2"), plain("7 apples"), plain("3,5"), plain("2s")
    ('3/2', '7', 'B', 'x^2', '7', '3,5', '2s')
    >>> [plain(gold) for gold in (".3", "3 - i", "1,i,-i", "1/2 (0.5)", "3/4, 0.75", "x or y", "2 (x + 1)")]
    ['.3', '3 - i', '1,i,-i', '1/2', '3/4', 'x or y', '2 (x + 1)']
    >>> plain("Es sind 1.234,50 Euro."), plain("65.990"), plain("65.990", True), plain("3,5", True), plain("1 200 m")
    ('1234.50', '65.990', '65990', '3.5', '1200')
    >>> [plain(gold) for gold in ("R$ 17,36", "17,36zł", "S/ 12.50", "₹1,200", "1 200 Kč", "정답은 ①입니다.")]
    ['17.36', '17.36', '12.50', '1200', '1200', '①']
    """
    if match := MIXED.fullmatch(gold):
        whole, numerator, denominator = map(int, match.groups())
        return f"{whole * denominator + numerator}/{denominator}"
    if match := ONE_CHOICE.fullmatch(gold) or QUOTED.fullmatch(gold):
        return next(filter(None, match.groups()))
    first, *others = [part.strip() for part in PARTS.split(gold) if part and part.strip()] or [gold]
    if others and all(compare(first, other)[0] is Verdict.CORRECT for other in others):
        return first
    number = _one_number(gold)
    is_grouped = re.fullmatch(r"-?\d{1,3}(?:([.,])\d{3})(?:\1\d{3})*(?:(?!\1)[.,]\d+)?", number)
    if {*",."} <= {*number}:  # the last mark is decimal
        is_comma = number.rfind(",") > number.rfind(".")
        if not is_grouped:
            return gold
    # One mark alone between groups of three digits is read as the file has it.
    elif "," in number:
        is_comma = commas or not is_grouped
        # 3,5 may be two numbers, but not an amount of money.
        if is_comma and not (commas or MONEY.search(gold)):
            return gold
    else:
        is_comma = bool(is_grouped) and (commas or number.count(".") > 1)
    thousands, point = (".", ",") if is_comma else (",", ".")
    return re.sub(rf"[\s'{thousands}]", "", number).replace(point, ".") or gold


def is_own_text(gold: str, problem: str) -> bool:
    """Return True if the grader compares a gold answer with a number as text, or takes a word in it for a product of
    letters that the problem does not have. `plain` finds no number in such an answer.

    >>> golds = ("18 (since 9 + 9)", "3-Apr", "2ab", "12 red balls", "x = 3 or x = 5", "Friday")
    >>> [is_own_text(gold, "Let a and b be the sides.") for gold in golds]
    [True, True, False, False, False, False]
    """
    if not any(map(str.isdigit, gold)) or value(gold) is not None or plain(gold) != gold:
        return False
    letters = "".join(VARIABLES.findall(problem))
    new = [word for word in words(gold) if word not in problem and not {*word} <= {*letters}]
    swapped = [gold.replace(word, word[::-1]) for word in new[:FEW] if word != word[::-1]]
    return compare(gold, "1")[1] == "text" or any(compare(gold, one)[0] is Verdict.CORRECT for one in swapped)


def _one_number(gold: str) -> str:
    """Return the number of a gold answer of one number and perhaps words; "" for any other gold answer."""
    gold = MONEY.sub(" ", gold)
    numbers = list(NUMBER.finditer(gold))
    return numbers[0].group() if len(numbers) == 1 and AROUND.fullmatch(NUMBER.sub("", gold)) else ""
