r"""The chain of equalities in which a number of free text stands last: its other members have to agree with it.

>>> equated("So x = 3 + 4 = "), equated("The total is 3 + 4 = ")
((['3 + 4'], 3), (['3 + 4'], 13))

Does not find the number (sentence.py) and does not calculate.
"""

import re

from grpo_math.grading.commit import DANGER, denied
from grpo_math.grading.spelled import CARDINALS

MONEY = "＄"  # an escaped dollar sign, while the others enclose mathematics
VERB = re.compile(r"\b(?:is|are|was|were|equals?|gives?|makes?|has|have|costs?|needs?|leaves?)\b", re.IGNORECASE)
_CHAIN = re.compile(  # first in its line, where that does not begin with "1."
    r"\A(?:\\begin\s*\{[a-z]+\})?(?!\s*\d{1,2}[.)]\s)\s*((?:[^=A-Za-z\n]|\\text\s*\{[^{}=]{0,40}\}|\\[a-z]+){1,60})=[\s$]*\Z"
)
_NO_MEMBER = re.compile(r"(?<![\\A-Za-z])(?<!\\text\{)(?<!\\text\{ )[A-Za-z]{2,}|[,;:.!?]\s|\\\\|&")  # of a chain
_ASIDE = re.compile(  # what may touch a member, and is not of it
    rf"\A(?:\\text\s*\{{[A-Za-z ]*\}}|\\(?:[^A-Za-z\d]|(?=\d))|\.(?!\d)|[^\w\\.({{\[+/×÷·√∛∞−–{MONEY}-])+"
)
_AREA = re.compile(r"\b(?:square|cubic) (?!roots?\b|of\b|the\b)[a-z]+")  # a measure
_SIGNS = {"plus": "+", "minus": "-", "times": "*", "over": "/", "divided by": "/", "multiplied by": "*"}
_IN_WORDS = re.compile(rf"(?<=[\d)] )({'|'.join(_SIGNS)})(?= [(＄$\d])")
_UNKNOWN = re.compile(r"(?<![\\A-Za-z{])[A-Za-z](?![A-Za-z])")
_PLAIN = re.compile(r"\A[-−$＄ ]*(?:[\d.,:{}% √$＄]|\\(?!text|m)[a-z]+)+\Z|_")  # a number alone, or more than numbers
_PARTIAL = re.compile(  # before a member, "10 percent of 60 = 6"
    "of|by|to|than|from|plus|minus|times|over|percent", re.IGNORECASE
)
_OPERATES = re.compile(rf"\b(?:{_PARTIAL.pattern}|and|with|each|at|in|for)\b|[-+*/×÷]", re.IGNORECASE)
_TERM = r"[＄$]?\s?\d[\d,.]*"
_TERMS = rf"([-−]?{_TERM}(?:\s?[-+*/×÷]\s?{_TERM}){{%s,8}})\s?=[\s$＄]*\Z"
_SUM = re.compile(  # plain arithmetic behind a verb: "The total is 3 + 4 = 7"
    rf"(?:(?:{VERB.pattern}|:)\s+|[\[(]){_TERMS % 0}", re.IGNORECASE
)
_ANY_SUM = re.compile(rf"(?:[A-Za-z]{{2}}|[,:])\s+{_TERMS % 1}")  # in one measure: "$2.50 - $2.24 = 26 cents" is none

_OR = re.compile(r"[\d)}%$][\s,($]*\bor\s*[$(\[]*\Z", re.IGNORECASE)
_LISTED = re.compile(r"(?:\A|[.!?]\s)[^=]*[\d)}%$]\s*([;,])\s*\Z")  # a value beside a chain: "5; 3 + 3 = 6"
_UNREAD = re.compile(
    rf"(?:\\[a-z]+|[^\x00-\x7f’“”–−—{MONEY}×÷·√])[^=A-Za-z\n]{{0,20}}=[\s${MONEY}]*\Z"
)  # a formula that is equal to it
_HEADLESS = re.compile(  # "The length is times 5 = ", "It is third 5 = "
    rf"(?:\A(?!.*\b(?:{CARDINALS})\b)\D*(?:\b(?:times|plus|minus|over|divided by)|[*/+×÷·√^])"
    rf"|(?:{DANGER.pattern})(?<!\bplus)(?<!\bminus)(?<!\btimes)(?<!\bover)(?<!\bby)(?<!\bthan)(?<!percent)\b)"
    rf"(?:\s|\\[ ,;:!])*[({MONEY}$]*\s?[-−]?[\d.,]+\s*=[\s{MONEY}$]*\Z"
)


def members_before(before: str, sentence: str, in_formula: bool, summed: bool) -> list[str] | None:
    """The other members of the chain in which a number stands last; None where they cannot be read, or where a value
    or a denial stands beside the chain.

    >>> members_before("So 3 + 4 = ", "So 3 + 4 = ", False, True), members_before("8; 7 = ", "8; 7 = ", False, False)
    (['3 + 4'], None)
    """
    before = _IN_WORDS.sub(lambda m: _SIGNS[m[1]], before)
    members, begin = equated(before)
    listed = _LISTED.search(before[:begin])
    if denied(before[:begin]) or _OR.search(before[:begin]):
        return None
    if listed is not None and (listed[1] == ";" or not summed):
        return None
    unread = not in_formula and (_UNREAD.search(before) or _HEADLESS.search(sentence))
    return None if unread and not members else members


def equated(before: str) -> tuple[list[str], int]:
    """The members of a chain of equalities before a number that are numbers, and where the chain begins.

    >>> equated("So x = 3 + 4 = "), equated("The total is 3 + 4 = "), equated("2x = 6, so x = ")
    ((['3 + 4'], 3), (['3 + 4'], 13), ([], 11))
    """
    members: list[str] = []
    signs, start = 0, len(before)
    end = len(before.rstrip(f" ${MONEY}"))
    while before[:end].endswith("="):
        signs += 1
        start = before.rfind("=", 0, end - 1) + 1
        words = list(_NO_MEMBER.finditer(before, start, end - 1))
        start = words[-1].end() if words else start
        member = _ASIDE.sub("", before[start : end - 1]).rstrip()
        partial = words and _PARTIAL.fullmatch(words[-1].group()) is not None and not _counts_nothing(before[:start])
        if member and not partial and _UNKNOWN.search(member) is None:
            members.insert(0, member)
        end = 0 if words else start
    start += len(before[start:]) - len(before[start:].lstrip())
    led_up = start + len(before[start:]) - len(before[start:].lstrip("*+/×÷- "))
    if signs > 1 or (members and _PLAIN.search(members[0]) is not None and _counts_nothing(before[:led_up])):
        return members, start
    single = _CHAIN.search(before) or _SUM.search(before)
    if single is None:
        single = _ANY_SUM.search(before)
        priced = single is not None and re.search(r"[$＄]", single[1]) and before.rstrip()[-1] not in "$＄"
        single = None if single is None or priced or not _counts_nothing(before[: single.start(1)]) else single
    return ([] if single is None else [single[1]]), start


def _counts_nothing(before: str) -> bool:
    """Do the words that lead up to a number make nothing else of it?

    >>> _counts_nothing("We paid. The total "), _counts_nothing("10 boys and girls "), _counts_nothing("half the ")
    (True, False, False)
    """
    clause = _AREA.sub(" ", re.split(r"[.!?:,;]\s|\n", before)[-1])
    named = re.split(r"\d", clause)
    return DANGER.search(clause) is None and (len(named) == 1 or _OPERATES.search(named[-1]) is None)
