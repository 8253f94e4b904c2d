r"""Numbers in English words as digits, if the words are one number.

>>> digits("twenty-five"), digits("two thousand three hundred"), digits("minus seven"), digits("minus 7")
('25', '2300', '-7', '-7')
>>> digits("six seven"), digits("two and three"), digits("three fifths"), digits("one and a half")
('six seven', '2 and 3', '\\frac{3}{5}', '1\\frac{1}{2}')

Does not read "two twenty-fifths".
"""

import re

UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
SMALL = {word: n for n, word in enumerate(UNITS.split())}
TENS = {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90}
SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
NUMBER_WORDS = frozenset((*SMALL, *TENS, *SCALES, "hundred"))
PARTS = {
    **dict.fromkeys(("half", "halve"), 2), "third": 3, "quarter": 4, "fifth": 5, "eighth": 8, "ninth": 9, "twelfth": 12,
    **{f"{word}th": n for word, n in SMALL.items() if n > 3}, "twentieth": 20, "hundredth": 100, "thousandth": 1000,
}  # fmt: skip
# A dozen is a unit behind digits, and part of the number in words.
_SPOKEN = SCALES | {"dozen": 12}
_NAMES = "|".join(sorted((*NUMBER_WORDS, "dozen"), key=len, reverse=True))
_PARTS = "|".join(PARTS)
_RUN = re.compile(
    rf"(?<![A-Za-z\\.,])(?:negative|minus)\s+(?=[\d\\(])|(?<![A-Za-z\\.,])(?:(?:negative|minus)\s+)?(?:(?:\d{{1,9}}|an?)\s+)?"
    rf"(?:{_NAMES})(?:[\s-]+(?:and[\s-]+)?(?:{_NAMES}))*(?![A-Za-z]|[\s-]+(?:{_PARTS}))",
    re.IGNORECASE,
)
# "one half", "three fifths", "two and a half": the name is plural behind any number but one.
_FRACTION = re.compile(
    rf"(?<![A-Za-z\\.,-])((?:negative|minus)\s+)?(?:({_NAMES})\s+and\s+)?"
    rf"(?:(?:an?|one)[\s-]+({_PARTS})|({_NAMES})[\s-]+({_PARTS})s)(?![A-Za-z-])",
    re.IGNORECASE,
)
_ORDINALS = {"first": 1, "second": 2} | {word: n for word, n in PARTS.items() if word.endswith(("rd", "th"))}
_ORDINAL = re.compile(
    rf"(?:\\text\s*\{{\s*)?(?:the )?(?:({'|'.join(TENS)})-)?({'|'.join(_ORDINALS)})\s*\}}?", re.IGNORECASE
)


def ordinal(text: str) -> str:
    """Return the number of an ordinal in words. Any other text is returned unchanged.

    >>> ordinal("third"), ordinal("the Twenty-first"), ordinal("a third")
    ('3', '21', 'a third')
    """
    match = _ORDINAL.fullmatch(text)
    return str(TENS.get((match[1] or "").lower(), 0) + _ORDINALS[match[2].lower()]) if match else text


def digits(text: str) -> str:
    """Return the text with every number and fraction in words as digits."""
    return text if len(text) > 400 else _RUN.sub(lambda run: _digits(run.group()), _FRACTION.sub(_fraction, text))


def _fraction(words: re.Match[str]) -> str:
    sign, whole, part, above, parts = (word and word.lower() for word in words.groups())
    numbers = [_whole([word]) for word in (whole or "zero", above or "one")]
    if None in numbers:  # "hundred fifths"
        return words.group()
    return f"{'-' * bool(sign)}{numbers[0] or ''}\\frac{{{numbers[1]}}}{{{PARTS[part or parts]}}}"


def _digits(run: str) -> str:
    sign, _, words = run.partition(" ") if re.match("negative|minus", run, re.IGNORECASE) else ("", "", run)
    if not words:  # the number after the word has digits
        return "-"
    number = _whole(re.findall(r"[a-z]+|\d+", words.lower()))
    if number is not None:
        return f"-{number}" if sign else str(number)
    pieces = re.split(r"\s+and\s+", words)
    return run if len(pieces) == 1 else " and ".join(map(_digits, pieces))


def _whole(tokens: list[str]) -> int | None:
    """Return a cardinal number, or None if the words are not exactly one number."""
    total, group, last, seen = 0, 0, 10**15, False  # the words of a group decrease: hundred, tens, units
    floor = 1000
    for at, word in enumerate(tokens):
        if word == "and" and seen and at + 1 < len(tokens):
            continue
        if word in SMALL or word in TENS:
            value = SMALL.get(word, TENS.get(word, 0))
            if (value if word in TENS else 1 if value < 10 else 10) >= floor or (value == 0 and len(tokens) > 1):
                return None
            group, floor, seen = group + value, (10 if word in TENS else 1), True
        elif word == "hundred" and 0 < group < 10:
            group, floor = group * 100, 100
        elif word in _SPOKEN and group and _SPOKEN[word] < last:
            total, group, last, floor = total + group * _SPOKEN[word], 0, _SPOKEN[word], 1000
        else:
            return None
    return total + group if seen else None
