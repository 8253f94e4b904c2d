r"""Two answer texts -> a verdict, or None where only symbolic mathematics can tell.

The order is exact numbers, the same text, words and choice letters (words.py), and then the trees (structure.py) of
every way in which the texts can be read: with a unit or without, with a label such as "Area =" or without.

>>> compare("1/2", r"\frac{1}{2}")[0].value, compare("3", "4")[0].value, compare(r"\sqrt{12}", r"2\sqrt{3}")[0] is None
('correct', 'wrong', True)

Does not import sympy, and its time is linear in the texts but for the bounded arithmetic of exact.py.
"""

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from grpo_math.grading import units
from grpo_math.grading.clean import CACHED_CHARACTERS, clean
from grpo_math.grading.exact import rational
from grpo_math.grading.expression import TooLarge, Tree, Unreadable, parse
from grpo_math.grading.structure import EXACT, Rules, assignment, equal, expanded
from grpo_math.grading.verdict import Verdict
from grpo_math.grading.words import TEXT, is_prose, same_words

FAST_NUMBER = re.compile(r"\\?\$?\s?(-?)\s?\\?\$?([1-9]\d{0,2}(?:,\d{3})+|\d{1,400})(\.\d{1,400})?\s?(\\?%)?\.?")
COMMA_DECIMAL = re.compile(r"-?(?:0,\d{1,400}|\d{1,400},\d{2,400})")
LABEL = re.compile(
    r"(?:\\text\s*\{[^{}]*\}|[A-Za-z]{4,}(?: [A-Za-z]+){0,4}|[A-Za-z]{1,2}\s?\([^()=<>]{1,24}\)|[A-Z]{2,4}"
    r"|\\angle\s*[A-Z]{1,3}|m\s?\\angle\s*[A-Z]{1,3}|\|?[A-Z]{2}\|?|[A-Za-z]_\{\\text\s*\{[^{}]*\}\})\s*=\s*(?=\S)"
)


class Reading(NamedTuple):
    tree: Tree
    unit: str | None


def compare(gold: str, answer: str, rules: Rules | None = None) -> tuple[Verdict | None, str]:
    """The verdict on an extracted answer and the rule that gave it; None where `rules` cannot tell."""
    gold_number, answer_number = _fast_number(gold), _fast_number(answer)
    if gold_number is not None and answer_number is not None:
        (p, p_percent), (q, q_percent) = gold_number, answer_number
        same = p == q or (p_percent != q_percent and (p / 100 == q if p_percent else p == q / 100))
        return (Verdict.CORRECT if same else Verdict.WRONG), "exact"
    if gold == answer:
        return Verdict.CORRECT, "same text"
    if _is_comma_decimal(gold, answer):
        return Verdict.CORRECT, "decimal comma"
    gold, answer = clean(gold), clean(answer)
    if not gold:
        return Verdict.BAD_GOLD, "the gold is empty"
    if not answer:
        return Verdict.NO_ANSWER, "the answer is empty"
    if _spaceless(gold) == _spaceless(answer):
        return Verdict.CORRECT, "same text"
    decided = same_words(gold, answer, compare)
    if decided is not None:
        return (Verdict.CORRECT if decided else Verdict.WRONG), "text"
    try:
        golds = readings(gold)
    except TooLarge as error:
        return Verdict.BAD_GOLD, f"the gold is {error}"
    try:
        answers = readings(answer)
    except TooLarge as error:
        return Verdict.UNPARSEABLE, f"the answer is {error}"
    if not golds or not answers:
        side, text = ("answer", answer) if golds else ("gold", gold)
        return (Verdict.WRONG, "text") if is_prose(text) else (None, f"unreadable {side}")
    pairs = [(g, a) for g in golds for a in answers]
    if any(g.unit and a.unit for g, a in pairs):  # both name a unit: it must be the same one
        pairs = [(g, a) for g, a in pairs if g.unit and g.unit == a.unit]
    results = {equal(g.tree, a.tree, rules or EXACT) for g, a in pairs}
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
    try:
        for reading in readings(clean(text)):
            assigned = assignment(reading.tree)
            number = rational(reading.tree if assigned is None else assigned[1])
            if number is not None:
                return number
    except TooLarge:
        pass
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


def _spaceless(text: str) -> str:
    """Without the spaces that separate nothing: "4 2" stays two numbers."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


@lru_cache(maxsize=8192)
def _readings(text: str) -> tuple[Reading, ...]:
    label = LABEL.match(text)
    found: list[Reading] = []
    for candidate in [text] if label is None else [text[label.end() :], text]:
        bare, unit = units.split(candidate)
        spellings = [(bare, unit)] if unit is None else [(bare, unit), (candidate, None)]
        for spelling, its_unit in spellings:
            for thousands in (True, False) if re.search(r"\d,\d{3}(?!\d)", spelling) else (True,):
                try:
                    reading = Reading(parse(TEXT.sub(r" \1 ", spelling), thousands), its_unit)
                except TooLarge:
                    raise
                except Unreadable:
                    continue
                if reading not in found:
                    found.append(reading)
    return tuple(found)


def readings(text: str) -> tuple[Reading, ...]:
    """Every way in which a cleaned text can be read: with its unit or without, "1,200" as a number or a list."""
    return _readings(text) if len(text) <= CACHED_CHARACTERS else _readings.__wrapped__(text)
