r"""Numbers in English words -> digits, where the words are one number.

>>> digits("twenty-five"), digits("two thousand three hundred"), digits("three and a half"), digits("minus seven")
('25', '2300', '\\frac{7}{2}', '-7')
>>> digits("six seven"), digits("two and three"), digits("5 halves")
('six seven', '2 and 3', '\\frac{5}{2}')

Does not read what is no number in one of these forms: it stays as it is.
"""

import re
from fractions import Fraction

UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
SMALL = {word: n for n, word in enumerate(UNITS.split())}
TENS = {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90}
SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7,
         "eighth": 8, "ninth": 9, "tenth": 10, "hundredth": 100}  # fmt: skip
NUMBER_WORDS = frozenset((*SMALL, *TENS, *SCALES, "hundred"))
CARDINALS = "|".join(sorted(NUMBER_WORDS))
NAMES = "|".join(sorted((*NUMBER_WORDS, *(f"{part}s?" for part in PARTS)), key=len, reverse=True))
RUN = re.compile(
    rf"(?<![A-Za-z\\.,])(?:(?:negative|minus)\s+(?=[\d\\(]|{NAMES}))?"
    rf"(?:(?:(?:\d{{1,9}}|an?)(?:\s+and)?(?:\s+an?)?[\s-]+)?(?:{NAMES})(?:[\s-]+(?:and[\s-]+)?(?:an?[\s-]+)?(?:{NAMES}))*)?"
    rf"(?![A-Za-z])",
    re.IGNORECASE,
)
HAS_WORD = re.compile(rf"negative|minus|{NAMES}", re.IGNORECASE)


def digits(text: str) -> str:
    """The text with every number in words as digits."""
    if len(text) > 400 or HAS_WORD.search(text) is None:
        return text
    return RUN.sub(lambda m: _run(m.group()) if m.group() else "", text)


def _run(run: str) -> str:
    found = _signed(run)
    if found is not None:
        return found
    pieces = [_signed(piece) for piece in re.split(r"\s+and\s+", run)]
    return " and ".join(piece or "" for piece in pieces) if None not in pieces else run


def _signed(run: str) -> str | None:
    tokens = re.findall(r"[a-z]+|\d+", run.lower())
    negative = tokens[:1] in (["negative"], ["minus"])
    tokens = tokens[negative:]
    if not tokens:
        return "-" if negative else ""
    value = _number(tokens)
    if value is None or (tokens[-1].isdigit() and len(tokens) == 1):
        return None if value is None else ("-" if negative else "") + tokens[0]
    value = -value if negative else value
    if value.denominator == 1:
        return str(value)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _number(tokens: list[str]) -> Fraction | None:
    """Of all tokens: ``two thousand and five``, ``two thirds``, ``three and a half``, ``half``."""
    part = PARTS.get(tokens[-1].removesuffix("s"))
    if part is None:
        whole = _whole(tokens)
        return None if whole is None else Fraction(whole)
    counted = tokens[:-1]
    if "and" in counted:
        at = len(counted) - 1 - counted[::-1].index("and")
        whole, above = _whole(counted[:at]), _above(counted[at + 1 :])
        return None if whole is None or above is None or above >= part else whole + Fraction(above, part)
    above = _above(counted) if counted or tokens[-1] == "half" else None
    several = above is not None and above > 1
    return None if above is None or several != tokens[-1].endswith("s") else Fraction(above, part)


def _above(tokens: list[str]) -> int | None:
    return 1 if tokens in ([], ["a"], ["an"]) else _whole(tokens)


def _whole(tokens: list[str]) -> int | None:
    """A cardinal number; None where the words are not exactly one."""
    if len(tokens) == 1 and tokens[0].isdigit():
        return int(tokens[0])
    total, group, last, seen = 0, 0, 10**15, False  # the words of a group come in falling size: hundred, tens, units
    floor = 1000
    for at, word in enumerate(tokens):
        if word == "and" and seen and at + 1 < len(tokens):
            continue
        if word in ("a", "an") and at == 0 and len(tokens) > 1:
            group, floor, seen = 1, 1, True
        elif word in SMALL or word in TENS:
            value = SMALL.get(word, TENS.get(word, 0))
            if (value if word in TENS else 1 if value < 10 else 10) >= floor or (value == 0 and len(tokens) > 1):
                return None
            group, floor, seen = group + value, (10 if word in TENS else 1), True
        elif word == "hundred" and 0 < group < 10:
            group, floor = group * 100, 100
        elif word in SCALES and group and SCALES[word] < last:
            total, group, last, floor = total + group * SCALES[word], 0, SCALES[word], 1000
        else:
            return None
    return total + group if seen else None
