r"""Two answer texts -> a verdict, or UNDECIDED if only a worker can decide.

The order is exact numbers, the same text, words and choice letters (words.py), and then the trees (structure.py) of all
readings of the texts: with or without a unit, with or without a label such as "Area =".

>>> compare("1/2", r"\frac{1}{2}")[0].value, compare("3", "4")[0].value, compare(r"\sqrt{12}", r"2\sqrt{3}")[0].value
('correct', 'wrong', 'undecided')

Does not import sympy, and takes at most about 10 ms in the calling process: a long text is left to a worker.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from grpo_math.grading.equal import units
from grpo_math.grading.equal.clean import CACHED_CHARACTERS, clean
from grpo_math.grading.equal.exact import rational
from grpo_math.grading.equal.expression import TooLarge, Unreadable, parse
from grpo_math.grading.equal.relations import equation_members
from grpo_math.grading.equal.structure import EXACT, Rules, equal
from grpo_math.grading.equal.text import MAX_CHARACTERS, strip_wrappers
from grpo_math.grading.equal.tree import EQUAL, UNDECIDED, Comparison, Degrees, Negative, Number, Percent, Product, Tree
from grpo_math.grading.equal.units import Unit
from grpo_math.grading.equal.words import AFFIRMED, BEYOND, TEXT, beyond, for_math_verify, same_words
from grpo_math.grading.lexicon import CHOICE, GROUPED
from grpo_math.grading.verdict import POLICY, GradingPolicy, Verdict
from grpo_math.grading.vocabulary import either

# Notation of a quantity that a problem asks for: an integral, a limit, an expectation, dots.
QUANTITY = re.compile(
    rf"{BEYOND.pattern}|\\(?:mathbb|Pr|Re|Im|nabla|partial|[lc]?dots)(?![A-Za-z])"
    r"|\\frac ?\{ ?d|\A\W*\^\{?\d+\}?[PC]_"
    r"|\.\.\.|\][_^]|E\}?\[|\\\|"
)
CONSTANT = re.compile(
    r"(?<=[\w)}|]) ?\+ ?(?:C(?:_\{?[01]\}?)?|[ckK]|(?:\\text ?\{ ?)?const(?:ant)?\.? ?\}?)\Z"
)  # of an integral
THOUSANDS = re.compile(rf"-?\$?{GROUPED}(?:\.\d+)?")
FAST_NUMBER = re.compile(r"\\?\$?\s?(-?)\s?\\?\$?([1-9]\d{0,2}(?:,\d{3})+|\d{1,400})(\.\d{1,400})?\s?(\\?%)?\.?")
QUICK_CHARACTERS = 400  # of a text compared in the calling process
ORDINARY = 160  # characters; gold answers of GSM8K and MATH have at most 159
# The name of a quantity and "=" before its value. In the order of the pattern: a text; words; f(x); P(A), e, i; limits
# and extrema; sets and their sizes; a function of an angle; deg, det; an inverse or a composition; sums and integrals;
# an area; f(2) + f(3); AB, an angle, the length of AB, x with a text as its index.
LABEL = re.compile(
    r"(?:\\text\s*\{[^{}\d\\]*\}(?: ?[A-Z]{1,4}(?![A-Za-z])|_\{?\w{1,6}\}?|\([^()=<>]{1,24}\))?"
    r"|[A-Za-z]{4,}(?: [A-Za-z]+){0,4}"
    r"|(?:[A-Za-df-hj-z]['\s]?|[A-Za-z]{2}|[A-Za-z]_\{?\w{1,3}\}?|\\(?:tau|sigma|mu|nu|omega) ?)"
    r"\([^()=<>]{1,24}\)|d[a-z]/d[a-z]"
    r"|P\([^()]{1,24}\)|[ei](?=\s*=\s*-?(?:\d|\\frac|\\sqrt))|\\(?:lim|max|min|sup|inf)(?:_(?:\{[^{}=]*\}|\w))?\s*[A-Za-z](?:_\{?\w{1,3}\}?)?(?:\([^()=<>]{1,24}\))?|\|?[A-Z](?:\s*\\c[au]p\s*[A-Z])+\|?|\|[A-Z]{2}\||\\(?:sin|cos|tan)\s*\\angle\s*[A-Z]{1,3}"
    r"|\\(?:deg|det|dim|rank|ker)\s*\(?[A-Za-z]\)?|#\s?[A-Z]|[f-h]\^\{?-1\}?\([a-z\d,]+\)|\([f-h]\s*\\circ\s*[f-h]\)\([\d,]+\)"
    r"|\\sum_(?:[a-z]|\{[^{}]*\})(?:\^(?:\w|\{\w+\}))?\s*[a-z]_\{?\w\}?|\\int_\{?\w\}?\^\{?\w\}?\s*[f-h](?:\([a-z]\)\s*d[a-z])?|[A-Z]_\{\\triangle\s*[A-Z]{3}\}|[f-h]\(\d\)(?:[+-][f-h]\(\d\))+|(?:\\sigma|s|R)\^\{?2\}?"
    r"|[A-Z]{2,4}|\\angle\s*[A-Z]{1,3}|m\s?\\angle\s*[A-Z]{1,3}|\|?[A-Z]{2}\|?|[A-Za-z]_\{\\text\s*\{[^{}]*\}\})\s*=\s*(?=\S)"
)

# Words before a single number: harmless ones ("about 5"), and those of "Area of the square is 5".
LEAD = re.compile(
    rf"(?:(?:{either('harmless')}[,:]?\s*)+"
    rf"|[A-Z][a-z]+ (?!.*\b{either('not', 'changes')} -?\$?\d)(?:[a-z]+ ){{0,4}}(?:is|are) )"
    r"(?=-?\$?[\d,.]+%?\s*(?:[^\W\d_]++\s*+){0,3}\Z)",
    re.IGNORECASE,
)
LETTER_BEFORE_TEXT = re.compile(  # (B) 12, (C) Friday
    rf"\A(?:\\text\s*\{{\s*\(?{CHOICE}[).]\s*\}}|\(?{CHOICE}[).])\s*(?=[-\d$]|[A-Za-z]{{2}}|\\(?!text))"
)
GOLD_CHOICE = re.compile(rf"\W*(?:text\w*\W*)?{CHOICE}(?![a-z])")
POINT = re.compile(r"[A-Z]'? ?(?=\([^()]+,[^()]+\)\Z)")  # P(2, 3)
MODULUS = re.compile(  # 2 (mod 5)
    r"\A((?!.*\\equiv).*\d) ?(?:\\pmod ?(?:\{ ?\d+ ?\}|\d)|(?:\\text ?\{ ?\(?|\() ?\\?b?mod ?\}? ?\d+ ?[)}]{1,2})\Z"
)
MIXED = re.compile(r"\A(-?\d+)\((\d+/\d+)\)(?=%?\Z)")  # 1(1/2), a gold answer of Math23K
GLUED = re.compile(r"\A(-?[\d,.]+\d)([mshl])\Z")  # 12m, but 2m may be a product
NO_LABEL = re.compile(r"\b(?:not|never|nor|but|except|without|or|and|with)\b", re.IGNORECASE)
SUM = re.compile(r"(?<=[\w}] )([+-])(?= )")
MEMBERS = re.compile(r"(=|\\approx|,(?!\d{3}(?!\d))|;|\b(?:and|or)\b)")  # between equal values, or values of a list

_SIGNS: dict[type[Tree], Unit] = {Degrees: {"degree": 1}, Percent: {"%": 1}}


class Reading(NamedTuple):
    tree: Tree
    unit: Unit | None


def compare(
    gold: str, answer: str, rules: Rules | None = None, policy: GradingPolicy = POLICY
) -> tuple[Verdict | Comparison, str]:
    """Return the verdict on an extracted answer, or UNDECIDED if `rules` cannot decide, and the rule that decided."""
    gold_number, answer_number = _fast_number(gold), _fast_number(answer)
    if gold_number is not None and answer_number is not None:
        (p, p_percent), (q, q_percent) = gold_number, answer_number
        if p_percent == q_percent:
            return (Verdict.CORRECT if p == q else Verdict.WRONG), "exact"
        if "$" not in gold + answer:
            same = (p == q and policy.percent_as_number) or (p / 100 == q if p_percent else p == q / 100)
            return (Verdict.CORRECT if same else Verdict.WRONG), "exact"
    for side, verdict in ((gold, Verdict.BAD_GOLD), (answer, Verdict.UNCHECKABLE)):
        if len(side) > MAX_CHARACTERS:
            return verdict, f"longer than {MAX_CHARACTERS} characters"
    if rules is None and max(len(gold), len(answer)) > QUICK_CHARACTERS:
        return UNDECIDED, "long"
    return _compared(gold, answer, (rules or EXACT)._replace(policy=policy))


def _compared(gold: str, answer: str, rules: Rules) -> tuple[Verdict | Comparison, str]:
    raw, gold, answer = answer, clean(gold), clean(answer)
    if decided := _by_text(gold, answer):
        return decided
    gold, answer = _in_one_form(gold, answer)
    same = same_words(gold, answer, compare)
    if same is not UNDECIDED:
        return (Verdict.CORRECT if same is EQUAL else Verdict.WRONG), "text"
    try:
        golds = readings(gold)[: 1 if THOUSANDS.fullmatch(gold) else None]  # a gold answer 1,200 is not a list
    except TooLarge as error:
        return Verdict.BAD_GOLD, f"the gold is {error}"
    try:
        answers = readings(answer, True)
    except TooLarge as error:
        return Verdict.UNCHECKABLE, f"the answer is {error}"
    if not answers and not (for_math_verify(strip_wrappers(raw)) and for_math_verify(answer)):
        return Verdict.UNPARSEABLE, "the answer cannot be read"
    if not golds and not beyond(gold):
        return Verdict.WRONG, "text"
    if not golds or not answers:
        return UNDECIDED, "unreadable"
    results = {equal(gold_tree, tree, rules) for gold_tree, tree in _pairs(golds, answers)}
    if EQUAL in results:
        return Verdict.CORRECT, "trees"
    return (UNDECIDED, "") if UNDECIDED in results else (Verdict.WRONG, "trees")


def _by_text(gold: str, answer: str) -> tuple[Verdict, str] | None:
    """Return the verdict on two cleaned texts that are the same, empty or too long; None for others."""
    if not gold:
        return Verdict.BAD_GOLD, "the gold is empty"
    if len(answer) > MAX_CHARACTERS:
        return Verdict.UNCHECKABLE, f"longer than {MAX_CHARACTERS} characters"
    if not answer:
        return Verdict.NO_ANSWER, "the answer is empty"
    return (Verdict.CORRECT, "same text") if _spaceless(gold) == _spaceless(answer) else None


def _in_one_form(gold: str, answer: str) -> tuple[str, str]:
    r"""Return both texts without what only one of them needs: a quantity that is asked for, the letter of a choice,
    another name of the constant of an integral.

    >>> _in_one_form("12", "(B) 12"), _in_one_form("x^2 + C", "x^2 + k"), _in_one_form("4", r"\int_0^2 x^3 dx = 4")
    (('12', '12'), ('x^2+C', 'x^2+C'), ('4', '4'))
    """
    if not beyond(gold) and not AFFIRMED.match(answer):
        answer = _without_quantity(answer)
    if CONSTANT.search(gold):
        gold, answer = (CONSTANT.sub("+C", side) for side in (gold, answer))
    return gold, answer if GOLD_CHOICE.match(gold) else LETTER_BEFORE_TEXT.sub("", answer)


def _pairs(golds: Sequence[Reading], answers: Sequence[Reading]) -> list[tuple[Tree, Tree]]:
    """Return the pairs of trees of which one has to be equal. If both have a unit, other readings do not count."""
    united = [(g, a) for g in golds for a in answers if g.unit is not None and a.unit is not None]
    if not united:
        return [(g.tree, a.tree) for g, a in product(golds, answers)]
    if agreed := [(g.tree, a.tree) for g, a in united if units.agree(g.unit, a.unit)]:
        return agreed
    converted = [(g.tree, a.tree, units.ratio(g.unit, a.unit)) for g, a in united]
    return [(gold_tree, Product((Number(ratio), tree))) for gold_tree, tree, ratio in converted if ratio]


def value(text: str) -> Fraction | None:
    r"""Return a text as a rational number, without units and labels, or None if it is not one.

    >>> value("$1,200"), value(r"x = \frac{3}{4}"), value("5 apples"), value("a lot")
    (Fraction(1200, 1), Fraction(3, 4), Fraction(5, 1), None)
    >>> value(r"0.\overline{142857}"), value(r"3\frac{1}{4}\text{ cups}"), value("1.5 million"), value("-25%")
    (Fraction(1, 7), Fraction(13, 4), Fraction(1500000, 1), Fraction(-1, 4))
    >>> value(r"\sqrt{\frac{49}{81}}"), value("2^{-3}"), value("-2^2"), value("-3.5"), value("x"), value("1, 2")
    (Fraction(7, 9), Fraction(1, 8), Fraction(-4, 1), Fraction(-7, 2), None, None)
    """
    fast = _fast_number(text)
    if fast is not None:
        return fast[0] / 100 if fast[1] else fast[0]
    with suppress(TooLarge):
        for reading in readings(clean(text)) if len(text) <= QUICK_CHARACTERS else ():
            assignment = equation_members(reading.tree)
            numbers = {rational(side) for side in ((reading.tree,) if assignment is None else assignment[1])}
            if len(numbers) == 1 and None not in numbers:
                return numbers.pop()
    return None


@lru_cache(maxsize=4096)
def _fast_number(text: str) -> tuple[Fraction, bool] | None:
    match = FAST_NUMBER.fullmatch(text) if len(text) < 900 else None
    if match is None:
        return None
    sign, whole, decimals, percent = match.groups()
    whole = whole.replace(",", "")
    number = Fraction(int(whole)) if decimals is None else Fraction(whole + decimals)
    return (-number if sign else number), percent is not None


def _without_quantity(text: str) -> str:
    r"""Return the value behind a requested quantity that our grammar cannot read. The others are members of a chain.

    >>> _without_quantity(r"\int_0^1 x \,dx = \frac{1}{2}"), _without_quantity("24 + 26 = 50")
    ('\\frac{1}{2}', '24 + 26 = 50')
    """
    depth, start = 0, 0
    for sign in re.finditer("[{}]|(?<![<>!])=", text) if QUANTITY.search(text) else ():
        depth += {"{": 1, "}": -1}.get(sign.group(), 0)
        if sign.group() == "=" and depth == 0:
            if not QUANTITY.search(text, start, sign.start()):
                break
            start = sign.end()
    return text[start:].strip()


def _spaceless(text: str) -> str:
    """Return the text without spaces, except between digits.

    >>> _spaceless("x + 4 2")
    'x+4 2'
    """
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


@lru_cache(maxsize=8192)
def _readings(text: str, answer: bool) -> tuple[Reading, ...]:
    short = len(text) <= ORDINARY  # longer texts are read as they are, with and without a unit
    label = (LABEL.match(text) or POINT.match(text)) if short else None
    if label is not None and NO_LABEL.search(label.group()):
        label = None  # "anything but x ="
    if short and answer:
        text = GLUED.sub(r"\1 \2", MODULUS.sub(r"\1", text))
    if not answer:
        text = MIXED.sub(r"\1 \2", text)
    # Drop words before a value, as in "about 5", unless they change the value.
    lead = LEAD.match(text) if short else None
    if lead is not None:
        text = text[lead.end() :]
    results: list[Reading] = []
    for candidate in [text] if label is None else [text[label.end() :], text]:
        bare, unit = _without_units(candidate)
        chain = candidate.count("=") > 1  # in a chain, cm is a unit and cannot be the product of c and m
        spellings = [(bare, unit)] if unit is None or chain else [(bare, unit), (candidate, None)]
        for spelling, its_unit in spellings:
            for thousands in (True, False) if short and re.search(r"\d,\d{3}(?!\d)", spelling) else (True,):
                try:
                    tree = parse(TEXT.sub(r" \1 ", spelling), thousands)
                except TooLarge:
                    raise
                except Unreadable:
                    continue
                sign = _SIGNS.get(type(tree.operand if isinstance(tree, Negative) else tree))
                # A sign such as % is the unit, unless a unit follows the value.
                reading = Reading(tree, sign if sign and not its_unit else its_unit)
                if reading not in results:
                    results.append(reading)
    return tuple(results)


def _without_units(text: str) -> tuple[str, Unit | None]:
    """Split off the unit at the end, and the same unit after the other members of a chain of equalities or a list."""
    bare, unit = units.split(text)
    if MEMBERS.search(bare) is None:
        return bare, unit
    pieces = MEMBERS.split(re.sub(r" ?\b(and|or)\s*\}", r"} \1 ", bare))  # \text{ cm and }
    unit = unit or units.split(pieces[-1].strip())[1]  # 20 + 5 = $25
    if unit is None or (not unit and "=" not in bare):  # 3 apples, 4 oranges
        return bare, unit
    for at in range(0, len(pieces), 2):
        member = re.sub(r"\\?\$\s?(?=[\d.])", "", pieces[at]) if unit.keys() == {"dollar"} else pieces[at]  # 54(\$0.15)
        terms = [units.split(term.strip()) for term in SUM.split(member)]  # 20 cents + 5 cents
        pieces[at] = "".join(term for term, _ in terms) if all(one in (None, unit) for _, one in terms) else "?"
    return " ".join(pieces), unit


def readings(text: str, answer: bool = False) -> tuple[Reading, ...]:
    """Return every way to read a cleaned text: with its unit or without, "1,200" as a number or a list.

    Words before the value of an ``answer`` are dropped, unless they change the value.
    """
    return (_readings if len(text) <= CACHED_CHARACTERS else _readings.__wrapped__)(text, answer)
