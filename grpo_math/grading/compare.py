r"""Two answer texts -> a verdict, or None where only symbolic mathematics can tell.

The order is exact numbers, the same text, words and choice letters (words.py), and then the trees (structure.py) of
every way in which the texts can be read: with a unit or without, with a label such as "Area =" or without.

>>> compare("1/2", r"\frac{1}{2}")[0].value, compare("3", "4")[0].value, compare(r"\sqrt{12}", r"2\sqrt{3}")[0] is None
('correct', 'wrong', True)

Does not import sympy, and does no more work than work.py allows for one answer: None where that is not enough.
"""

import math
import re
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from grpo_math.grading import units
from grpo_math.grading.clean import CACHED_CHARACTERS, clean
from grpo_math.grading.commit import DANGER
from grpo_math.grading.exact import rational
from grpo_math.grading.expression import TooLarge, Tree, Unreadable, parse
from grpo_math.grading.house import HOUSE, House
from grpo_math.grading.relations import stated
from grpo_math.grading.structure import EXACT, Rules, equal, expanded
from grpo_math.grading.text import strip_wrappers
from grpo_math.grading.verdict import Verdict
from grpo_math.grading.words import TEXT, for_math_verify, is_prose, same_words
from grpo_math.grading.work import CHARACTER, MAX_CHARACTERS, UNITS, Spent, bounded, charge, shortened

ASIDE = re.compile(r"(?<=[\d}]) ?\(([A-Za-z]{2}[A-Za-z \-]{0,40})\)\Z")
THOUSANDS = re.compile(r"-?\$?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
FAST_NUMBER = re.compile(r"\\?\$?\s?(-?)\s?\\?\$?([1-9]\d{0,2}(?:,\d{3})+|\d{1,400})(\.\d{1,400})?\s?(\\?%)?\.?")
ORDINARY = 160  # characters; golds of GSM8K and MATH have at most 159
COMMA_DECIMAL = re.compile(r"-?(?:0,\d{1,400}|\d{1,400},\d{2,400})")
LABEL = re.compile(
    r"(?:\\text\s*\{[^{}\d\\]*\}|[A-Za-z]{4,}(?: [A-Za-z]+){0,4}|(?:[A-Za-df-hj-z]\s?|[A-Za-z]{2})\([^()=<>]{1,24}\)"
    r"|[A-Z]{2,4}|\\angle\s*[A-Z]{1,3}|m\s?\\angle\s*[A-Z]{1,3}|\|?[A-Z]{2}\|?|[A-Za-z]_\{\\text\s*\{[^{}]*\}\})\s*=\s*(?=\S)"
)

NO_LABEL = re.compile(rf"{DANGER.pattern}|not\b|\bwith\b", re.IGNORECASE)
SUM = re.compile(r"(?<=[\w}] )([+-])(?= )")
OWN_WORDS = re.compile(r"(?<=[\d}])\s*(?:\\text\s*\{)?[A-Za-z\- ]{3,60}\}?\Z")


class Reading(NamedTuple):
    tree: Tree
    unit: str | None


def compare(gold: str, answer: str, rules: Rules | None = None, house: House = HOUSE) -> tuple[Verdict | None, str]:
    """The verdict on an extracted answer and the rule that gave it; None where `rules` cannot tell."""
    gold_number, answer_number = _fast_number(gold), _fast_number(answer)
    if gold_number is not None and answer_number is not None:
        (p, p_percent), (q, q_percent) = gold_number, answer_number
        if p_percent == q_percent:
            return (Verdict.CORRECT if p == q else Verdict.WRONG), "exact"
        if "$" not in gold + answer:
            same = (p == q and house.percent_as_number) or (p / 100 == q if p_percent else p == q / 100)
            return (Verdict.CORRECT if same else Verdict.WRONG), "exact"
    if gold == answer:
        return Verdict.CORRECT, "same text"
    if _is_comma_decimal(gold, answer):
        return Verdict.CORRECT, "decimal comma"
    try:
        with bounded(UNITS if rules is None else math.inf):  # a worker may take the time that it is given
            return _compared(gold, answer, (rules or EXACT)._replace(house=house))
    except Spent:
        return None, "too much work for this process"


def _compared(gold: str, answer: str, rules: Rules) -> tuple[Verdict | None, str]:
    short = shortened(answer)
    gold, answer, raw = clean(gold), clean(short or ""), strip_wrappers(short or "")
    if not gold:
        return Verdict.BAD_GOLD, "the gold is empty"
    if short is None or len(answer) > MAX_CHARACTERS:
        return Verdict.UNPARSEABLE, f"the answer is longer than {MAX_CHARACTERS} characters"
    if not answer:
        return Verdict.NO_ANSWER, "the answer is empty"
    if _spaceless(gold) == _spaceless(answer):
        return Verdict.CORRECT, "same text"
    decided = same_words(gold, answer, compare)
    if decided is not None:
        return (Verdict.CORRECT if decided else Verdict.WRONG), "text"
    try:
        golds = readings(gold)[: 1 if THOUSANDS.fullmatch(gold) else None]  # a gold 1,200 is no list
    except TooLarge as error:
        return Verdict.BAD_GOLD, f"the gold is {error}"
    try:
        charge(CHARACTER * len(answer))
        answers = readings(answer, words_of(gold))
    except TooLarge as error:
        return Verdict.UNPARSEABLE, f"the answer is {error}"
    if not golds or not answers:
        side, text = ("answer", answer) if golds else ("gold", gold)
        if is_prose(text):
            return Verdict.WRONG, "text"
        if not answers and not (for_math_verify(raw) and for_math_verify(answer)):
            if not (golds or is_prose(gold) or for_math_verify(gold)):
                return Verdict.BAD_GOLD, "the gold cannot be read"
            return Verdict.UNPARSEABLE, "the answer cannot be read"
        return None, f"unreadable {side}"
    united = any(g.unit and a.unit for g in golds for a in answers)  # both name a unit: no reading without counts
    pairs = [
        (g, a) for g in golds for a in answers if not united or (g.unit and a.unit and units.agree(g.unit, a.unit))
    ]
    results = {equal(g.tree, a.tree, rules) for g, a in pairs}
    if True in results:
        return Verdict.CORRECT, "trees"
    return (None, "") if None in results else (Verdict.WRONG, "trees")


def value(text: str) -> Fraction | None:
    r"""The rational number that a text is, units and labels aside; None where it is none.

    >>> value("$1,200"), value(r"x = \frac{3}{4}"), value("five"), value("a lot")
    (Fraction(1200, 1), Fraction(3, 4), Fraction(5, 1), None)
    """
    fast = _fast_number(text)
    if fast is not None:
        return fast[0] / 100 if fast[1] else fast[0]
    with suppress(TooLarge, Spent), bounded():
        text = clean(shortened(text) or "")
        charge(CHARACTER * len(text))
        for reading in readings(text):
            found = stated(reading.tree)
            numbers = {rational(side) for side in ((reading.tree,) if found is None else found[1])}
            if len(numbers) == 1 and None not in numbers:
                return numbers.pop()
    return None


def holds_several(gold: str) -> bool:
    r"""Is the gold a list or a set, so that its members may stand in several boxes?

    >>> holds_several("1, 2"), holds_several(r"\pm 2"), holds_several("(1, 2)")
    (True, True, False)
    """
    try:
        return any(expanded(reading.tree)[0] in ("list", "set") for reading in readings(clean(gold)))
    except TooLarge:
        return False


@lru_cache(maxsize=4096)
def _fast_number(text: str) -> tuple[Fraction, bool] | None:
    found = FAST_NUMBER.fullmatch(text) if len(text) < 900 else None
    if found is None:
        return None
    sign, whole, decimals, percent = found.groups()
    whole = whole.replace(",", "")
    number = Fraction(int(whole)) if decimals is None else Fraction(whole + decimals)
    return (-number if sign else number), percent is not None


def _is_comma_decimal(gold: str, answer: str) -> bool:
    """Is one "0,75" and the other 0.75? One digit after the comma reads as a list: "4,5" is 4 and 5."""
    if (gold.isascii() and "," in gold) == ("," in answer):
        return False
    return COMMA_DECIMAL.fullmatch(gold if "," in gold else answer) is not None and (
        gold.replace(",", ".") == answer.replace(",", ".")
    )


def words_of(gold: str) -> frozenset[str]:
    """The words that a gold puts behind its number, which an answer may put there too.

    >>> sorted(words_of(r"5\\text{ blue daps}")), sorted(words_of("x + 1"))
    (['blue', 'daps'], [])
    """
    found = OWN_WORDS.search(gold)
    return frozenset(re.findall("[a-z]{3,}", found.group().replace("\\text", "").lower()) if found is not None else ())


def _spaceless(text: str) -> str:
    """Without the spaces that separate nothing.

    >>> _spaceless("x + 4 2")
    'x+4 2'
    """
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


@lru_cache(maxsize=8192)
def _readings(text: str, own: frozenset[str]) -> tuple[Reading, ...]:
    short = len(text) <= ORDINARY  # a longer one is read as it stands, with its unit or without
    label, aside = (LABEL.match(text), ASIDE.search(text)) if short else (None, None)
    if label is not None and (NO_LABEL.search(label.group()) or _names_itself(text, label.end())):
        label = None  # "anything but x ="
    if aside is not None and units.canonical(aside[1], own=own) is not None:  # "5 (cm)"
        text = f"{text[: aside.start()]} {aside[1]}"
    found: list[Reading] = []
    for candidate in [text] if label is None else [text[label.end() :], text]:
        bare, unit = _without_units(candidate, own)
        chain = candidate.count("=") > 1  # in which 6 cm cannot be 6 times c times m, a name
        spellings = [(bare, unit)] if unit is None or chain else [(bare, unit), (candidate, None)]
        for spelling, its_unit in spellings:
            for thousands in (True, False) if short and re.search(r"\d,\d{3}(?!\d)", spelling) else (True,):
                try:
                    tree = parse(TEXT.sub(r" \1 ", spelling), thousands)
                except TooLarge:
                    raise
                except Unreadable:
                    continue
                kind = {"degrees": "degree", "percent": "%"}.get((tree[1] if tree[0] == "neg" else tree)[0])
                reading = Reading(tree, its_unit or kind)
                if reading not in found:
                    found.append(reading)
    return tuple(found)


def _names_itself(text: str, end: int) -> bool:
    """Does the letter before the equal sign of a label stand behind it too, or any letter alone? It is an equation.

    >>> _names_itself("length i = -1 + i", 10), _names_itself("length x = 5", 10), _names_itself("BC = B", 5)
    (True, False, True)
    """
    if re.fullmatch(r"[A-Z]+\s*=\s*(?:\\text\s*\{\s*)?\(?[A-Z]\W*", text) is not None:
        return True
    name = re.search(r" ([A-Za-z])\s*=\s*\Z", text[:end])
    return name is not None and re.search(rf"(?<![A-Za-z\\]){name[1]}(?![A-Za-z])", text[end:]) is not None


def _without_units(text: str, own: frozenset[str]) -> tuple[str, str | None]:
    """Without the unit at its end, and in a chain of equalities without the same one behind the other members."""
    bare, unit = units.split(text, own)
    if "=" not in bare:
        return bare, unit
    unit = unit or units.split(text.rpartition("=")[2].strip(), own)[1]  # 20 + 5 = $25
    if unit is None:
        return bare, unit
    members = []
    for member in bare.split("="):
        member = re.sub(r"\\?\$\s?(?=[\d.])", "", member) if unit == "dollar" else member  # 54(\$0.15)
        terms = [units.split(term.strip(), own) for term in SUM.split(member)]  # 20 cents + 5 cents
        same = all(one in (None, unit) for _, one in terms)
        members.append("".join(term for term, _ in terms) if same else "?")
    return " = ".join(members), unit


def readings(text: str, own: frozenset[str] = frozenset()) -> tuple[Reading, ...]:
    """Every way in which a cleaned text can be read: with its unit or without, "1,200" as a number or a list.

    ``own`` are words beside the known ones that may be a unit: those of the gold, where the text is its answer.
    """
    return (_readings if len(text) <= CACHED_CHARACTERS else _readings.__wrapped__)(text, own)
