r"""Answers that are no expression: times of day, choice letters, plain words.

>>> same_words("8:34 pm", "20:34", compare=None), same_words("Tuesday", "It is tuesday", compare=None)
(True, True)

Does not read mathematics: None means that the texts are for expression.py.
"""

import re
from collections.abc import Callable

from grpo_math.grading.verdict import Verdict

Compare = Callable[[str, str], "tuple[Verdict | None, str]"]

TIME = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE)
LETTER = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?(?:\(\s*([A-Ja-j])\s*\)|([A-Ja-j])(?:[).:](?=\s|$))|([A-J])(?=$))\s*(.*)",
    re.I,
)
TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
ARTICLE = re.compile(r"^(?:(?:it is|it's|they are|is|are|the|an?|always|on)\s+)+", re.IGNORECASE)
NOTHING = {"no solution", "no solutions", "no real solution", "no real solutions", "none", "empty set"}
ALL_REALS = {"all real numbers", "all reals", "real numbers", "all real values", "set of real numbers"}
SHORT_WORDS = {"yes", "no", "odd", "even", "true", "all", "none"}


def same_words(gold: str, answer: str, compare: Compare) -> bool | None:
    """Are two cleaned texts the same time of day, choice, or words? None where the gold is none of them.

    ``compare`` is asked where a choice is a letter with its text, as in "(B) 12".
    """
    gold_time, answer_time = TIME.fullmatch(gold), TIME.fullmatch(answer)
    if gold_time is not None and answer_time is not None:
        return _same_time(gold_time, answer_time)
    plain_gold, plain_answer = TEXT.sub(r"\1", gold).strip(), TEXT.sub(r"\1", answer).strip()
    gold_choice = _choice(plain_gold)
    if gold_choice is not None and gold_choice[0].isupper():
        letter, rest = gold_choice
        answer_choice = _choice(plain_answer)
        if answer_choice is not None:
            if answer_choice[0].upper() != letter:
                return False
            return not rest or not answer_choice[1] or compare(rest, answer_choice[1])[0] is not Verdict.WRONG
        verdict = compare(rest, plain_answer)[0] if rest else None
        return None if verdict is None else verdict is Verdict.CORRECT
    gold_words, answer_words = _words(plain_gold), _words(plain_answer)
    if gold_words and gold_words == answer_words:
        return True
    if _everything(gold, gold_words) and _everything(answer, answer_words):
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
    return written in (other_written, other_meant) or other_written == meant


def _choice(text: str) -> tuple[str, str] | None:
    """The letter of a multiple-choice answer and what stands beside it."""
    found = LETTER.fullmatch(text) if len(text) < 400 else None
    return None if found is None else (found[1] or found[2] or found[3], found[4].strip())


def _words(text: str) -> str:
    """A text of words in one spelling, or "" where it is mathematics."""
    if len(text) > 2000 or not re.fullmatch(r"[A-Za-z][A-Za-z' .,\-]*", text):
        return ""
    words = ARTICLE.sub("", re.sub(r"\s+", " ", text).strip(" .,").lower())
    return words if len(words) > 3 or words in SHORT_WORDS else ""


def _everything(text: str, words: str) -> bool:
    return words in ALL_REALS or text.replace(" ", "") in ("\\mathbb{R}", "(-\\infty,\\infty)", "(-\\infty,+\\infty)")


def is_prose(text: str) -> bool:
    """Does a text hold words rather than mathematics?

    >>> is_prose("three of them"), is_prose("x + 1"), is_prose(r"\sqrt{2}")
    (True, False, False)
    """
    plain = TEXT.sub(r"\1", text)
    return bool(re.search(r"[A-Za-z]{4}|[^\x00-\x7f]{2}", re.sub(r"\\[A-Za-z]+", "", plain))) and "\\" not in plain
