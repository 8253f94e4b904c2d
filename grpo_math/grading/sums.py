r"""Does the sum that a sentence ends with before its equal sign come to the number behind it?

>>> comes_to("She pays 4 boxes * $3 + $2", "14"), comes_to("She pays 4 boxes * $3", "14"), comes_to("half of 14", "7")
(True, False, True)

Words between the numbers and signs of a sum are passed over, as measures are. A number that nothing is done to is none.

Does not find chains of equalities (equated.py).
"""

import re
from fractions import Fraction

from grpo_math.grading.exact import rational
from grpo_math.grading.expression import Unreadable, parse

TOKENS = 40  # of a sum that are looked at, from its end
_TOKEN = re.compile(
    r"(?P<number>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)|%|//|[-+*/×÷·–−()]|(?<![A-Za-z])[A-Za-z]+(?![A-Za-z])"
)
_SIGNS = {"//": "/", "×": "*", "÷": "/", "·": "*", "–": "-", "−": "-", "%": "/100", "of": "*", "times": "*", "x": "*"}
_WORDS = {"and": "+", "plus": "+", "minus": "-", "over": "/", "half": "(1/2)", "twice": "2*", "double": "2*"}
_MORE = re.compile(r"\\(?!\s*[%$])|[√^_!²³¹π½¼¾=]")  # than sums of numbers
_BEGUN = re.compile(r"(?:[*/+×÷·√^]|\d\s*[-–−]|\s[-–−]\s)[\s($＄]*\Z")  # before a part of a sum


def comes_to(left: str, number: str) -> bool:
    """Is ``number`` the value of a sum at the end of ``left``, from one of its numbers on? Percents and cents may do.

    >>> comes_to("In 3 days 30% * 50%", "15"), comes_to("$2.50 - $2.24", "26"), comes_to("3 * 7 + 0", "7")
    (True, True, False)
    >>> comes_to("5 - 12", "-7"), comes_to("12 - 5", "-7")
    (True, False)
    """
    wanted = None if _MORE.search(left + number) is not None else _value(re.sub(r"[^\d./-]", "", number))
    if wanted is None:
        return False
    scaled = wanted / 100 if re.search(r"[%$＄]", left) is not None else wanted
    return any(value in (wanted, scaled) for value in _values(left))


def _values(left: str) -> list[Fraction]:
    """Of the sums at the end of a text, the shortest one first."""
    found: list[Fraction] = []
    sum_ = ""
    for token in list(_TOKEN.finditer(left))[: -TOKENS - 1 : -1]:
        text = token.group().lower()
        part = text.replace(",", "") if token["number"] else _SIGNS.get(text, _WORDS.get(text, ""))
        part = part or (text if text in "+-*/()" else "")
        if text == "and" and "product" in left:
            part = "*"
        if text == "/" and left[token.end() : token.end() + 1].isalpha():  # "2 eggs/box"
            continue
        if token["number"] and sum_[:1] == "(" and left[token.end()] == "(":
            part += "*"
        elif (token["number"] or text == ")") and sum_[:1] not in "+-*/)":  # two numbers with nothing between them
            break
        if part in ("+", "-", "*", "/") and sum_[:1] in ("", "+", "*", "/"):  # "8 eggs / box * 6"
            continue
        sum_ = part + sum_
        if (token["number"] or text == "(" or text in ("half", "twice", "double")) and re.search("[-+*/]", sum_):
            value = None if _BEGUN.search(left[: token.start()]) else _value(sum_)
            found += [] if value is None else [value]
    return found


def _value(text: str) -> Fraction | None:
    try:
        return rational(parse(text))
    except Unreadable:
        return None
