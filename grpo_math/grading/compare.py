r"""Two answer texts -> a verdict, or None where only symbolic mathematics can tell.

The order is exact numbers, the same text, words and choice letters, and then the trees: lists without order, tuples
with it, intervals with their brackets, equations up to a factor, units. What is left are single expressions, which a
``Leaf`` compares: `exact_leaf` here, numeric.py in the worker.

>>> compare("1/2", r"\frac{1}{2}")[0].value, compare("3", "4")[0].value, compare(r"\sqrt{12}", r"2\sqrt{3}")[0] is None
('correct', 'wrong', True)

Does not import sympy, and its time is linear in the texts but for the bounded arithmetic of exact.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from grpo_math.grading import units
from grpo_math.grading.clean import clean
from grpo_math.grading.exact import certainly_huge, rational
from grpo_math.grading.expression import TooLarge, Tree, Unreadable, parse
from grpo_math.grading.verdict import Verdict

MAX_ITEMS = 40  # of an unordered list; longer lists are compared in order

FAST_NUMBER = re.compile(r"\\?\$?\s?(-?)\s?\\?\$?([1-9]\d{0,2}(?:,\d{3})+|\d{1,400})(\.\d{1,400})?\s?(\\?%)?\.?")
COMMA_DECIMAL = re.compile(r"-?\d{1,400},\d{1,400}")
TIME = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE)
LETTER = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?(?:\(\s*([A-Ja-j])\s*\)|([A-Ja-j])(?:[).:](?=\s|$))|([A-J])(?=$))\s*(.*)",
    re.I,
)
LABEL = re.compile(
    r"(?:\\text\s*\{[^{}]*\}|[A-Za-z]{4,}(?: [A-Za-z]+){0,4}|[A-Za-z]{1,2}\s?\([^()=<>]{1,24}\)|[A-Z]{2,4}"
    r"|\\angle\s*[A-Z]{1,3}|m\s?\\angle\s*[A-Z]{1,3}|\|?[A-Z]{2}\|?|[A-Za-z]_\{\\text\s*\{[^{}]*\}\})\s*=\s*(?=\S)"
)
TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
ARTICLE = re.compile(r"^(?:(?:it is|it's|they are|is|are|the|an?|always|on)\s+)+", re.IGNORECASE)
NOTHING = {
    "no solution",
    "no solutions",
    "no real solution",
    "no real solutions",
    "none",
    "empty set",
    "no such values",
}
SHORT_WORDS = {"yes", "no", "odd", "even", "true", "all", "none"}

Leaf = Callable[[Tree, Tree], "bool | None"]
Proportional = Callable[[Tree, Tree, bool], "bool | None"]


class Rules(NamedTuple):
    """How single expressions are compared, and how two left sides of equations are."""

    leaf: Leaf
    proportional: Proportional


class Reading(NamedTuple):
    tree: Tree
    unit: str | None


def compare(gold: str, answer: str, rules: Rules | None = None) -> tuple[Verdict | None, str]:
    """The verdict on an extracted answer and the rule that gave it; None where `rules` cannot tell."""
    gold_number, answer_number = _fast_number(gold), _fast_number(answer)
    if gold_number is not None and answer_number is not None:
        (p, p_percent), (q, q_percent) = gold_number, answer_number
        equal = p == q or (p_percent != q_percent and (p / 100 == q if p_percent else p == q / 100))
        return (Verdict.CORRECT if equal else Verdict.WRONG), "exact"
    if gold == answer:
        return Verdict.CORRECT, "same text"
    if COMMA_DECIMAL.fullmatch(gold if answer_number else answer) and gold.replace(",", ".") == answer.replace(
        ",", "."
    ):
        return Verdict.CORRECT, "decimal comma"
    gold, answer = clean(gold), clean(answer)
    if not gold:
        return Verdict.BAD_GOLD, "the gold is empty"
    if not answer:
        return Verdict.NO_ANSWER, "the answer is empty"
    if _spaceless(gold) == _spaceless(answer):
        return Verdict.CORRECT, "same text"
    decided = _as_words(gold, answer)
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
    if not golds and _is_prose(gold):
        return Verdict.WRONG, "text"
    if golds and not answers and _is_prose(answer):
        return Verdict.WRONG, "text"
    if not golds or not answers:
        return None, "unreadable gold" if not golds else "unreadable answer"
    rules = rules or EXACT
    results = {_equal_readings(g, a, rules) for g in golds for a in answers}
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
            assigned = _assignment(reading.tree)
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
        return any(_expanded(reading.tree)[0] in ("list", "set") for reading in readings(clean(gold)))
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


def _spaceless(text: str) -> str:
    """Without the spaces that separate nothing: "4 2" stays two numbers."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


# ---------------------------------------------------------------------------------------------------- words, letters


def _as_words(gold: str, answer: str) -> bool | None:
    """Times of day, choice letters, and plain words; None where the gold is none of them."""
    gold_time, answer_time = TIME.fullmatch(gold), TIME.fullmatch(answer)
    if gold_time is not None and answer_time is not None:
        return _same_time(gold_time, answer_time)
    plain_gold, plain_answer = TEXT.sub(r"\1", gold).strip(), TEXT.sub(r"\1", answer).strip()
    gold_choice = _choice(plain_gold, plain_gold)
    if gold_choice is not None:
        letter, rest = gold_choice
        answer_choice = _choice(plain_answer, plain_gold)
        if answer_choice is not None:
            if answer_choice[0] != letter:
                return False
            return True if not rest or not answer_choice[1] else compare(rest, answer_choice[1])[0] is not Verdict.WRONG
        if rest:
            return None if compare(rest, plain_answer)[0] is None else compare(rest, plain_answer)[0] is Verdict.CORRECT
        return None
    gold_words, answer_words = _words(plain_gold), _words(plain_answer)
    if gold_words and gold_words == answer_words:
        return True
    if "\\emptyset" in (gold, answer) and (gold_words in NOTHING or answer_words in NOTHING):
        return True
    return None


def _same_time(one: re.Match[str], two: re.Match[str]) -> bool:
    """Are two times of day equal, where "8:34 pm" may be written 20:34 or 8:34?"""
    if (int(one[2]), int(one[3] or 0)) != (int(two[2]), int(two[3] or 0)):
        return False
    hours = []
    for time in (one, two):
        hour, half = int(time[1]), (time[4] or "").lower()
        hours.append((hour, hour % 12 + (12 if half == "p" else 0) if half else None))
    (written, meant), (other_written, other_meant) = hours
    if meant is not None and other_meant is not None:
        return meant == other_meant
    return written == other_written or other_written == meant or written == other_meant


def _choice(text: str, gold: str) -> tuple[str, str] | None:
    """The letter of a multiple-choice answer and what stands beside it."""
    found = LETTER.fullmatch(text) if len(text) < 400 else None
    if found is None:
        return None
    letter = found[1] or found[2] or found[3]
    if text is gold and not letter.isupper():
        return None
    return letter.upper(), found[4].strip()


def _words(text: str) -> str:
    """A text of words in one spelling, or "" where it is mathematics."""
    if len(text) > 2000 or not re.fullmatch(r"[A-Za-z][A-Za-z' .,\-]*", text):
        return ""
    words = ARTICLE.sub("", re.sub(r"\s+", " ", text).strip(" .,").lower())
    return words if len(words) > 3 or words in SHORT_WORDS else ""


def _is_prose(text: str) -> bool:
    plain = TEXT.sub(r"\1", text)
    return bool(re.search(r"[A-Za-z]{4}|[^\x00-\x7f]{2}", re.sub(r"\\[A-Za-z]+", "", plain))) and "\\" not in plain


# ------------------------------------------------------------------------------------------------------------ readings


@lru_cache(maxsize=8192)
def _readings(text: str) -> tuple[Reading, ...]:
    texts = [text]
    label = LABEL.match(text)
    if label is not None:
        texts.insert(0, text[label.end() :])
    found: list[Reading] = []
    for candidate in texts:
        bare, unit = units.split(candidate)
        spellings = [(bare, unit)] if unit is None else [(bare, unit), (candidate, None)]
        for spelling, its_unit in spellings:
            for thousands in (True, False) if re.search(r"\d,\d{3}(?!\d)", spelling) else (True,):
                try:
                    reading = Reading(
                        parse(TEXT.sub(r" \1 ", spelling) if "\\text" in spelling else spelling, thousands), its_unit
                    )
                except TooLarge:
                    raise
                except Unreadable:
                    continue
                if reading not in found:
                    found.append(reading)
    return tuple(found)


def readings(text: str) -> tuple[Reading, ...]:
    """Every way in which a cleaned text can be read: with its unit or without, "1,200" as a number or a list."""
    return _readings(text)


# ----------------------------------------------------------------------------------------------------------- structure


def _equal_readings(gold: Reading, answer: Reading, rules: Rules) -> bool | None:
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    return _equal(_expanded(gold.tree), _expanded(answer.tree), rules)


def _equal(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    if gold == answer:
        return True
    if gold[0] == answer[0] == "relation" and not (_is_chain(gold) or _is_chain(answer)):
        sides = _two_sides(gold), _two_sides(answer)
        if None not in sides and sides[0][1] == sides[1][1] in ("<", "<="):  # type: ignore
            if rules.proportional(sides[0][0], sides[1][0], True):  # type: ignore
                return True
    gold, answer = _resolved(gold), _resolved(answer)
    if gold[0] == "relation" or answer[0] == "relation":
        return _equal_relations(gold, answer, rules)
    return _equal_values(gold, answer, rules)


def _resolved(tree: Tree) -> Tree:
    """A membership is its set, an inequality its interval, several of them their union."""
    if tree[0] == "relation":
        if len(tree) == 4 and tree[2] == "in":
            return tree[3]
        interval = _interval(tree)
        return tree if interval is None else interval
    if tree[0] == "list" and all(item[0] == "relation" and _interval(item) is not None for item in tree[1:]):
        return ("union", *(_interval(item) for item in tree[1:]))
    return tree


def _equal_relations(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    if gold[0] != "relation" and gold[0] != "list" and _assignment(answer) is None:  # sin x = 1/2 answers 1/2
        last = answer[-1]
        if all(sign == "=" for sign in answer[2::2]) and not _variables(last) and not _variables(gold):
            return _equal(gold, last, rules)
    gold_assigned, answer_assigned = _assignment(gold), _assignment(answer)
    if gold_assigned is not None and answer_assigned is not None and gold_assigned[0] and answer_assigned[0]:
        if gold_assigned[0] == answer_assigned[0]:
            return _equal(gold_assigned[1], answer_assigned[1], rules)
        if not _variables(gold_assigned[1]) and not _variables(answer_assigned[1]):
            return False
    elif (gold_assigned is not None or gold[0] != "relation") and (
        answer_assigned is not None or answer[0] != "relation"
    ):
        left = gold if gold_assigned is None else gold_assigned[1]
        right = answer if answer_assigned is None else answer_assigned[1]
        return _equal(left, right, rules)
    if gold[0] != "relation" or answer[0] != "relation":
        relation = gold if gold[0] == "relation" else answer
        return False if all(sign in ("=", "~", "!=") for sign in relation[2::2]) else None
    gold_sides, answer_sides = _two_sides(gold), _two_sides(answer)
    if gold_sides is None or answer_sides is None:
        return None
    if gold_sides[1] != answer_sides[1]:
        return False
    return rules.proportional(gold_sides[0], answer_sides[0], gold_sides[1] in ("<", "<="))


def _assignment(tree: Tree) -> tuple[str, Tree] | None:
    """``x = 5``, ``5 = x``, ``x = 2 + 3 = 5`` -> (x, 5); ``2 + 3 = 5`` -> ("", 5); None for any other tree."""
    if tree[0] != "relation" or any(sign not in ("=", "~") for sign in tree[2::2]):
        return None
    sides = list(tree[1::2])
    if "~" in tree[2::2]:
        first = tree[2::2].index("~")
        sides = sides[: first + 1] if first or sides[0][0] != "var" else sides
        if len(sides) == 1:
            return "", sides[0]
    if sides[0][0] == "var":
        return sides[0][1], sides[-1]
    if sides[-1][0] == "var":
        return sides[-1][1], sides[0]
    if sides[0][0] == "tuple" and all(part[0] == "var" for part in sides[0][3:]):
        return "", sides[-1]
    if not any(_variables(side) for side in sides[:-1]):
        return ("", sides[-1]) if not _variables(sides[-1]) else None
    if _is_label(sides[0]) and not _variables(sides[-1]):
        return "", sides[-1]
    return None


def _is_label(tree: Tree) -> bool:
    """A name of geometry on the left of a value: ``AB = 4``, ``NO/BO = 2``, ``V_1 : V_2 = 11 : 21``."""
    if tree[0] == "var":
        return tree[1][0].isupper() or "_" in tree[1]
    return tree[0] in ("mul", "div", "ratio") and all(_is_label(part) for part in tree[1:])


def _is_chain(relation: Tree) -> bool:
    return len(relation) != 4


def _two_sides(relation: Tree) -> tuple[Tree, str] | None:
    """``a = b`` -> (a - b, "="); ``a > b`` -> (a - b, "<") with the larger side first."""
    if len(relation) != 4:
        return None
    left, sign, right = relation[1:]
    if sign in (">", ">=", "=", "!="):
        return ("add", left, ("neg", right)), {">": "<", ">=": "<="}.get(sign, sign)
    if sign in ("<", "<="):
        return ("add", right, ("neg", left)), sign
    return None


def _is_name(tree: Tree) -> bool:
    """``x`` or ``f(x)``"""
    return tree[0] == "var" or (tree[0] == "mul" and len(tree) == 3 and all(part[0] == "var" for part in tree[1:]))


INFINITY: Tree = ("const", "inf")


def _interval(relation: Tree) -> Tree | None:
    """``1 < x <= 2`` -> the tree of (1, 2]; ``|x| < 3`` -> (-3, 3); None for any other relation."""
    sides, signs = list(relation[1::2]), list(relation[2::2])
    if any(sign not in ("<", "<=", ">", ">=") for sign in signs):
        return None
    if signs[0] in (">", ">="):
        sides.reverse()
        signs = [{">": "<", ">=": "<="}.get(sign, "?") for sign in reversed(signs)]
    if "?" in signs or any(sign not in ("<", "<=") for sign in signs):
        return None
    if len(sides) == 2:
        small, large = sides
        if small[0] == "call" and small[1] == "abs" and small[2][0] == "var" and not _variables(large):
            both = ("(", ")") if signs[0] == "<" else ("[", "]")
            return ("tuple", *both, _negated(large), large)
        if small[0] == "var" and not _variables(large):
            return ("tuple", "(", ")" if signs[0] == "<" else "]", ("neg", INFINITY), large)
        if large[0] == "var" and not _variables(small):
            return ("tuple", "(" if signs[0] == "<" else "[", ")", small, INFINITY)
    if len(sides) == 3 and _is_name(sides[1]) and not _variables(sides[0]) and not _variables(sides[2]):
        return ("tuple", "(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]", sides[0], sides[2])
    return None


def _equal_values(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    kinds = (gold[0], answer[0])
    if kinds == ("tuple", "tuple"):
        return _equal_tuples(gold, answer, rules)
    if "union" in kinds:
        return _unordered(gold[1:], answer[1:], rules) if kinds == ("union", "union") else False
    if "matrix" in kinds:
        return _equal_matrices(gold, answer, rules)
    if "ratio" in kinds:
        return _equal_ratios(gold, answer, rules)
    if "base" in kinds:
        return kinds == ("base", "base") and gold[1:] == answer[1:]
    gold_items, answer_items = _items(gold), _items(answer)
    if gold_items is None and answer_items is None:
        return _equal_leaves(gold, answer, rules)
    gold_named, answer_named = _named(gold_items), _named(answer_items)
    if gold_named is not None and answer_named is not None:
        if gold_named.keys() != answer_named.keys():
            return False
        return _all(_equal(gold_named[name], answer_named[name], rules) for name in gold_named)
    if gold_named is not None or answer_named is not None:  # x = 1, y = 2 is the pair (1, 2)
        named, other = (gold_named, answer) if gold_named is not None else (answer_named, gold)
        assert named is not None
        if other[0] not in ("tuple", "list"):
            return False
        if other[0] == "list":
            return _in_order(tuple(named.values()), other[1:], rules) or _unordered(
                tuple(named.values()), other[1:], rules
            )
        return _equal_tuples(("tuple", "(", ")", *(named[name] for name in sorted(named))), other, rules)
    gold, answer = _grouped(gold), _grouped(answer)
    for one, two in ((gold, answer), (answer, gold)):
        if one[0] == "tuple":
            if two[0] == "list" and one[1:3] == ("(", ")"):
                return _in_order(one[3:], two[1:], rules)
            if two[0] in ("list", "set") and one[1:3] == ("[", "]"):
                return _unordered(one[3:], two[1:], rules)
            return False
    return _unordered(
        (gold,) if gold_items is None else gold_items, (answer,) if answer_items is None else answer_items, rules
    )


def _equal_leaves(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    gold_percent, answer_percent = gold[0] == "percent", answer[0] == "percent"
    if gold_percent and answer_percent:
        return rules.leaf(gold[1], answer[1])
    if gold_percent or answer_percent:  # 25% is 0.25, and 25 where the problem asks for a percentage
        bare = rules.leaf(gold[1] if gold_percent else gold, answer[1] if answer_percent else answer)
        return True if bare else _any((bare, rules.leaf(gold, answer)))
    if gold[0] == "degrees" or answer[0] == "degrees":
        return rules.leaf(gold[1] if gold[0] == "degrees" else gold, answer[1] if answer[0] == "degrees" else answer)
    return rules.leaf(gold, answer)


def _items(tree: Tree) -> tuple[Tree, ...] | None:
    """The members of a list, set, or tuple."""
    if tree[0] in ("list", "set"):
        return tree[1:]
    return tree[3:] if tree[0] == "tuple" else None


def _named(items: tuple[Tree, ...] | None) -> dict[str, Tree] | None:
    """``x = 1, y = 2`` -> {x: 1, y: 2}; None where a name is missing or occurs twice."""
    if items is None or len(items) < 2:
        return None
    named: dict[str, Tree] = {}
    for item in items:
        assigned = _assignment(item)
        if assigned is None or not assigned[0] or assigned[0] in named:
            return None
        named[assigned[0]] = assigned[1]
    return named


def _grouped(tree: Tree) -> Tree:
    """``p = 5, q = 2, p = 7, q = 2`` -> the list of (5, 2) and (7, 2)."""
    items = _items(tree)
    if tree[0] != "list" or items is None or len(items) < 4:
        return tree
    assigned = [_assignment(item) for item in items]
    names = [a[0] if a is not None else "" for a in assigned]
    period = len(set(names))
    if "" in names or period in (1, len(names)) or names != names[:period] * (len(names) // period):
        return tree
    values = [a[1] for a in assigned if a is not None]
    return ("list", *(("tuple", "(", ")", *values[i : i + period]) for i in range(0, len(values), period)))


def _equal_tuples(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    if len(gold) != len(answer):
        return False
    for bracket, side in ((1, 3), (2, -1)):
        infinite = _is_infinite(gold[side]) and _is_infinite(answer[side])
        if gold[bracket] != answer[bracket] and not infinite:
            return False
    return _in_order(gold[3:], answer[3:], rules)


def _equal_matrices(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    flat = []
    for tree in (gold, answer):
        if tree[0] == "matrix":
            flat.append([cell for row in tree[1:] for cell in row])
        elif tree[0] == "tuple" and tree[1:3] == ("(", ")"):
            flat.append(list(tree[3:]))
        else:
            return False
    if gold[0] == answer[0] and [len(row) for row in gold[1:]] != [len(row) for row in answer[1:]]:
        return False
    if gold[0] != answer[0]:  # a tuple stands for a column
        matrix = gold if gold[0] == "matrix" else answer
        if any(len(row) != 1 for row in matrix[1:]):
            return False
    return _in_order(flat[0], flat[1], rules)


def _equal_ratios(gold: Tree, answer: Tree, rules: Rules) -> bool | None:
    def quotient(tree: Tree) -> Tree:
        return ("div", tree[1], tree[2]) if tree[0] == "ratio" and len(tree) == 3 else tree

    if gold[0] == answer[0] and len(gold) > 3:
        return _in_order(gold[1:], answer[1:], rules)
    gold, answer = quotient(gold), quotient(answer)
    return False if "ratio" in (gold[0], answer[0]) else _equal_values(gold, answer, rules)


def _in_order(gold: Sequence[Tree], answer: Sequence[Tree], rules: Rules) -> bool | None:
    if len(gold) != len(answer):
        return False
    return _all(_equal(g, a, rules) for g, a in zip(gold, answer, strict=True))


def _unordered(gold: Sequence[Tree], answer: Sequence[Tree], rules: Rules) -> bool | None:
    """Is there a matching of equal members? Values only: ``x = 1, x = 2`` counts as 1, 2."""
    if len(gold) != len(answer):
        return False
    gold, answer = [_member(g) for g in gold], [_member(a) for a in answer]
    gold_numbers, answer_numbers = [rational(g) for g in gold], [rational(a) for a in answer]
    if None not in gold_numbers and None not in answer_numbers:
        return Counter(gold_numbers) == Counter(answer_numbers)
    if len(gold) > MAX_ITEMS:
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


def _member(tree: Tree) -> Tree:
    assigned = _assignment(tree)
    return tree if assigned is None else assigned[1]


def _all(results: object) -> bool | None:
    seen = set(results)  # type: ignore
    return False if False in seen else None if None in seen else True


def _any(results: object) -> bool | None:
    seen = set(results)  # type: ignore
    return True if True in seen else None if None in seen else False


def _is_infinite(tree: Tree) -> bool:
    return tree == INFINITY or tree == ("neg", INFINITY)


def _negated(tree: Tree) -> Tree:
    return ("num", -tree[1]) if tree[0] == "num" else ("neg", tree)


def _variables(tree: object) -> bool:
    if not isinstance(tree, tuple):
        return False
    return bool(tree) and (tree[0] == "var" or any(_variables(part) for part in tree[1:]))


def _has_sign_choice(tree: object) -> bool:
    return isinstance(tree, tuple) and bool(tree) and (tree[0] == "pm" or any(_has_sign_choice(p) for p in tree[1:]))


def _expanded(tree: Tree) -> Tree:
    r"""``a \pm b`` -> the list of a + b and a - b, wherever it stands."""
    if not _has_sign_choice(tree):
        return tree
    if tree[0] == "list":
        items: list[Tree] = []
        for item in tree[1:]:
            expanded = _expanded(item)
            items += expanded[1:] if expanded[0] == "list" and item[0] != "list" else [expanded]
        return ("list", *items)
    if tree[0] == "relation" and _has_sign_choice(tree[-1]):
        tree = tree[-1]
    return ("list", _chosen(tree, False), _chosen(tree, True))


def _chosen(tree: Tree, minus: bool) -> Tree:
    if not isinstance(tree, tuple):
        return tree
    if tree and tree[0] == "pm":
        left, right = _chosen(tree[1], minus), _chosen(tree[2], minus)
        right = _negated(right) if minus else right
        return right if left == ("num", Fraction(0)) else ("add", left, right)
    return tuple(_chosen(part, minus) for part in tree)


# -------------------------------------------------------------------------------------------------------- exact leaves


def exact_leaf(gold: Tree, answer: Tree) -> bool | None:
    """Rational numbers by their value, other expressions by their form; None where the forms differ."""
    if gold == answer:
        return True
    p, q = rational(gold), rational(answer)
    if p is not None and q is not None:
        return p == q
    for number, other in ((p, answer), (q, gold)):
        if number is not None and (_is_infinite(other) or certainly_huge(other)):
            return False
    if _is_infinite(gold) and _is_infinite(answer):
        return False  # they would be the same tree
    return True if _sorted(gold) == _sorted(answer) else None


def _sorted(tree: Tree) -> Tree:
    """The same tree with the operands of sums and products in one order."""
    if not isinstance(tree, tuple) or not tree:
        return tree
    parts = [_sorted(part) if isinstance(part, tuple) else part for part in tree[1:]]
    if tree[0] in ("add", "mul"):
        flat: list[Tree] = []
        for part in parts:
            flat += part[1:] if part[0] == tree[0] else [part]
        parts = sorted(flat, key=repr)
    return (tree[0], *parts)


def _exact_proportional(gold: Tree, answer: Tree, positive: bool) -> bool | None:
    return True if _sorted(gold) == _sorted(answer) else None


EXACT = Rules(exact_leaf, _exact_proportional)
