r"""The chain of equalities in which a number of free text stands last: its other members have to agree with it.

>>> equated("So x = 3 + 4 = "), equated("The total is 3 + 4 = ")
((['3 + 4'], 3), (['3 + 4'], 13))

Does not find the number (sentence.py) and does not calculate.
"""

import re

from grpo_math.grading.commit import DANGER, denied
from grpo_math.grading.sums import comes_to
from grpo_math.grading.units import canonical

MONEY = "＄"  # an escaped dollar sign, while the others enclose mathematics
VERB = re.compile(r"\b(?:is|are|was|were|equals?|gives?|makes?|has|have|costs?|needs?|leaves?)\b", re.IGNORECASE)
_NO_MEMBER = re.compile(r"(?<![\\A-Za-z])(?<!\\text\{)(?<!\\text\{ )[A-Za-z]{2,}|[,;:.!?]\s|\\\\|&")  # of a chain
_ASIDE = re.compile(  # what may touch a member, and is not of it
    rf"\A(?:\\text\s*\{{[A-Za-z ]*\}}|\\(?:[^A-Za-z\d]|(?=\d))|\.(?!\d)|[^\w\\.({{\[+/×÷·√∛∞−–{MONEY}-])+"
)
_UNKNOWN = re.compile(r"(?<![\\A-Za-z{])[A-Za-z](?![A-Za-z])")
_PARTIAL = re.compile("of|by|plus|minus|times|over|percent", re.IGNORECASE)  # before a member
_DONE_TO = re.compile(  # the word before a number with which something may be done: "half of the 14 = 7"
    rf"(?<![A-Za-z])(?:{DANGER.pattern}|(?<![^./]\d )(?<!\d\d )of|by|over|percent|and|the|th(?:at|ose|ese|eir)"
    r"|his|her|its)\s*\Z",
    re.IGNORECASE,
)
_MEASURE = re.compile(r"\s*(?:\\text\s*\{\s*)?([A-Za-z]+(?: [A-Za-z]+){0,2})")  # behind a number
_OR = re.compile(r"[\d)}%$][\s,($]*\bor\s*[$(\[]*\Z", re.IGNORECASE)
_LISTED = re.compile(  # a value beside a chain: "5; 3 + 3 = 6"
    r"(?:\A|[.!?]\s)[^=]*[\d)}%$]\s*([,:!?.]|\.\.+|\\.)\s*\Z|[\d)}%$]\s*(;)\s*\Z"
)
_WORDS_BETWEEN = re.compile(rf"=(?=\s*[A-Za-z])[\sA-Za-z./]+=?[\s{MONEY}$]*\Z")  # "3 = the 7"
_NUMBER_AND_WORDS = re.compile(  # "It is 3 hours = "
    rf"(?:\A|(?:([A-Za-z]+)|[,:.])\s+)[{MONEY}$]?\s?[-−]?\d[\d,.]*((?: +[A-Za-z]+){{1,2}})\s*\Z"
)
_CALCULATED = re.compile(r"\d.*(?:\s[-+*/×÷·−–x]\s|[*/+×÷])")
_VARIABLE = re.compile(r"\d[A-Za-z](?![A-Za-z(])|(?<![A-Za-z])[A-Za-z]\s?(?:[-+*/^]|\Z)")  # "5x + 2"
_NAMED = re.compile(r"(?:(?<![\\A-Za-z])[A-Za-z]+['’!\"]?|(?<![\\\w])[A-Za-z]+\([\w ,]*\))\s*\Z")  # "length", "f(2)"


def members_before(before: str, number: str, after: str, in_formula: bool, summed: bool) -> list[str] | None:
    """The other members of the chain in which a number stands last; None where they cannot be read or calculated, or
    where a value or a denial stands beside the chain.

    >>> members_before("So 3 + 4 = ", "7", ".", False, True), members_before("half of 14 = ", "6", ".", False, False)
    ([], None)
    >>> members_before("It is 7 cm = ", "8", " cm.", False, False), members_before("8; 7 = ", "7", "", False, False)
    (['7'], None)
    """
    before = _without_measure(before + (number[0] if number[0] in f"${MONEY}" else ""), after)
    members, begin = equated(before)
    listed = _LISTED.search(before[:begin])
    if denied(before[:begin]) or _OR.search(before[:begin]) or _WORDS_BETWEEN.search(before):
        return None
    if listed is not None and (listed[2] or not summed):
        return None
    left, sign, gap = before.rpartition("=")
    if in_formula or not sign or re.search(r"\w", gap) is not None:
        return members
    if gap.strip(f" ${MONEY}"):
        return None
    clause = re.split(r"=|[,;:.]\s", left)[-1]
    if comes_to(clause, number):
        head = left[: len(left) - len(clause)]
        return None if _unlike(head.rstrip("= "), after) else equated(head)[0]
    named = _NAMED.search(clause) is not None and _CALCULATED.search(clause) is None
    if members or not (named or _VARIABLE.search(clause)):
        return members or None
    return None if _unlike(clause, after) else []


def _unlike(before: str, after: str) -> bool:
    """Is a number with words set equal to one that is not the same in another measure?

    >>> _unlike("It is 3 pages ", " of it."), _unlike("It is 2 hours ", " minutes."), _unlike("2 of 3 eggs ", ".")
    (True, False, False)
    """
    left = _NUMBER_AND_WORDS.search(before)
    words = _MEASURE.match(after)
    if left is None or _PARTIAL.fullmatch(left[1] or "") is not None:
        return False
    measures = [canonical(left[2].strip()), None if words is None else canonical(words[1])]
    return any(unit is None or unit.startswith("#") for unit in measures)  # "3 boxes = 12 eggs": nouns measure nothing


def _without_measure(before: str, after: str) -> str:
    """A chain without the measure that its last number has too.

    >>> _without_measure("3 apples + 4 apples = ", " apples now."), _without_measure("1 foot = ", " inches.")
    ('3+ 4= ', '1 foot = ')
    """
    words = _MEASURE.match(after)
    measure = "" if words is None else words[1].removesuffix("s")
    while measure and "=" in before:
        same = rf"(?<=\d)\s*(?:\\text\s*\{{\s*)?{measure}s?\s*\}}?(?=[\s${MONEY}]*[-+*/=)])"
        before = re.sub(same, "", before)
        measure = measure.rpartition(" ")[0].removesuffix("s")
    return before


def equated(before: str) -> tuple[list[str], int]:
    """The members of a chain of equalities before a number that are numbers, and where the chain begins.

    >>> equated("So x = 3 + 4 = "), equated("The total is 3 + 4 = "), equated("2x = 6, so x = ")
    ((['3 + 4'], 3), (['3 + 4'], 13), ([], 11))
    """
    members: list[str] = []
    start = len(before)
    end = len(before.rstrip(f" ${MONEY}"))
    while before[:end].endswith("="):
        start = before.rfind("=", 0, end - 1) + 1
        words = list(_NO_MEMBER.finditer(before, start, end - 1))
        start = words[-1].end() if words else start
        member = _ASIDE.sub("", before[start : end - 1]).rstrip()
        if member and _UNKNOWN.search(member) is None and _DONE_TO.search(before[:start]) is None:
            members.insert(0, member)
        end = 0 if words else start
    return members, start + len(before[start:]) - len(before[start:].lstrip())
