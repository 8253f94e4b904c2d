r"""Words around an answer, in 33 languages: vocabulary.json has them, sorted by language.

Position finds an answer in every language. A word only sharpens it, or refuses a number that the word changes:

    answer    a label: the value behind it is the answer
    harmless  words that may stand between a label and its value, and before a value in a box
    not       words that negate the value, up to three words before it
    changes   words that change the value directly behind them: minus, double, the cube of
    after     words that change the value directly before them: thousand, dozen, "is not" where it follows
    and, or   words between two boxes, or two values, that are one list
    to        words between the two ends of a range
    is        words between a subject and its value
    maybe     words between two values, one of which is not meant
    decimal   the decimal sign

>>> "nicht" in words("not"), bool(re.match(either("answer"), "antwort")), re.match(either("and"), "andere")
(True, True, None)
"""

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from grpo_math.grading.lexicon import CHOICE

LANGUAGES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("vocabulary.json").read_text(encoding="utf-8")
)
# A letter of a script other than Latin and Greek, with its marks; a letter of Latin script.
FOREIGN = (
    "[\u0400-\u052f\u0531-\u0587\u0591-\u05ea\u0610-\u065f\u0670-\u06d3\u0900-\u1dff\u2c00-\u2dff\u3005-\u3007"
    "\u3041-\uabff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]"
)
LATIN = "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff\u0300-\u036f"
# Later scripts, from Thai on, put no space between words.
_SPACED = "\u0e00"
# A word starts here: no letter of a script with spaces is before it.
START = r"(?<![^\W\d_\u0e00-\U0010ffff])"


@cache
def words(kind: str, decimal: str = ",.") -> frozenset[str]:
    """Return the words of one kind, in all languages or in those with this decimal sign."""
    languages = (language for language in LANGUAGES.values() if language["decimal"] in decimal)
    return frozenset(word.lower() for language in languages for word in language[kind])


def either(*kinds: str, decimal: str = ",.") -> str:
    """Return a pattern that matches one whole word of these kinds."""
    return whole_words(frozenset().union(*(words(kind, decimal) for kind in kinds)))


def whole_words(listed: Iterable[str]) -> str:
    """Return a pattern that matches one of these words, the longest first."""
    patterns = []
    for word in sorted(listed, key=len, reverse=True):
        pattern = re.escape(word).replace(r"\ ", r"\s")
        pattern = f"(?-i:{pattern})" if len(word) == 1 else pattern  # "a" is a word, and A a choice
        # A word of a script with spaces ends here, also after a mark, as in Bengali.
        ends = word[-1] < _SPACED and (word[-1].isalpha() or not word[-1].isascii())
        patterns.append(pattern + (r"(?![^\W\d_])" if ends else ""))
    return f"(?:{'|'.join(patterns) or '(?!)'})"


def _joint(kind: str) -> str:
    return whole_words(word for word in words(kind) if word not in ("and", "or", "a", "、"))


# "and" or "or" of another language before a value: a number, a formula, a choice or "x =".
_JOINT = re.compile(
    rf"{START}(?:(?P<text>\\(?:text|textrm|mbox|mathrm)\s*\{{\s*)?(?:(?P<and>{_joint('and')})|(?P<or>{_joint('or')}))"
    r"(?(text)\s*\})\s*+"
    rf"(?=\(?[-−–+]?\s?(?:[\d$π√]|\\(?!text))|\(?{CHOICE}(?![A-Za-z])|[a-z](?:_\S{{1,3}}|[₀-₉])?\s?=))"
)
# A letter, or a mark of one, in exactly one way: two ways for each letter would be an exponential search.
_LETTER = rf"(?:[^\W\d_]|(?![^\W\d_]){FOREIGN})"
_VALUE_BEFORE = re.compile(rf"(?:[\d)}}\]$%°€]|{START}{CHOICE})(?:\s?{_LETTER}{{1,20}}){{0,2}}[,\s]*\Z")
# "Minus" before a number: no value and no part of a word is before it.
_MINUS = re.compile(
    r"(?:[Nn]egative|[Mm]inus|минус|мінус|moins|menos|meno|μείον|eksi|负|負|マイナス|마이너스|ลบ|ناقص|سالب|منفی|מינוס|माइनस|âm|mínusz?|miinus|ঋণাত্মক|ऋणात्मक)\s*(?=\d)"
)
_NO_MINUS = re.compile(r"(?:[\d)}$]\s?|[^\W\d_\u0e00-\U0010ffff])\Z")
_VALUE_BEHIND = re.compile(rf"[\d$(]|{CHOICE}|[a-z]\S? ?=")
_NUMBER_BEFORE = re.compile(rf"(?:[\d$]|{START}{CHOICE}\)?)\s\Z")


def in_english(text: str) -> str:
    """Return the text with "and" and "or" between two values in English. A short word may be two variables.

    >>> in_english("12 Äpfel und 13 Äpfel"), in_english("x=2或x=-3"), in_english("2 y -3"), in_english("12 y 13")
    ('12 Äpfel and 13 Äpfel', 'x=2 or x=-3', '2 y -3', '12 and 13')
    """

    def english(joint: re.Match[str]) -> str:
        before, word = text[max(0, joint.start() - 60) : joint.start()], joint["and"] or joint["or"]
        short = len(word) < 3 and word.isascii() and not joint["text"]
        if not (_NUMBER_BEFORE if short else _VALUE_BEFORE).search(before) or (
            short and _VALUE_BEHIND.match(text, joint.end()) is None
        ):
            return joint.group()
        return f"{'' if before[-1].isspace() else ' '}{'and' if joint['and'] else 'or'} "

    text = _MINUS.sub(
        lambda minus: minus.group() if _NO_MINUS.search(text, max(0, minus.start() - 2), minus.start()) else "-", text
    )
    return _JOINT.sub(english, text)
