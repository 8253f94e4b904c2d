r"""Text without a marker -> its answer: "the answer is X", a bare value, or the last value of the last sentence.

>>> phrase("The answer is $5."), bare("So she sells 42 apples."), bare("It is 5 or 6.")
(Said(text='5', how='phrase', start=4, end=17), Said(text='42', how='last number', start=13, end=15), None)

Does not look at boxes, ``####`` and tags (extract.py).
"""

import re
from typing import NamedTuple

from grpo_math.grading.commit import DANGER, HEDGE, denied, not_meant
from grpo_math.grading.spelled import digits
from grpo_math.grading.text import DOLLAR, strip_wrappers

TRIES = 12  # the last phrases that are looked into
NEAR = 200  # characters before a bare value that are looked at
MONEY = "＄"  # an escaped dollar sign, while the others enclose mathematics
REFUSAL = re.compile(r"(?:I|We|Sorry|Unfortunately)[ ,']", re.IGNORECASE)
ANSWER_PHRASE = re.compile(
    r"(?:\banswers?\b|\b(?:correct|right|final) (?:option|choice|value)\b|答案|\bresult\b|\bsolution\b)"
    r"[ \t]{0,9}(?:\([^()\n]{0,60}\)[ \t]{0,9})?"
    r"(?:(?:to|for|of|in)\b[^.:=\n]{0,80}?)?[*_\s]{0,4}"
    r"(?:\bis\b|\bare\b|\bwould be\b|\bmust be\b|\bequals\b|[:：=是为])"
    r"[*_\s]{0,4}(?:(?:simply|just|therefore|thus|equal to|exactly|option|choice|indeed|given by)\b)?[:：*_\s]{0,4}",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"(?<!\b[A-Z])(?<!\b[apAP]\.[mM])(?<!\\)[.!?](?!\s*=)(?:[\"')*\]]*)(?=\s|$)")
CLAUSE = re.compile(
    r"[,;]? (?:because|since|which|where|when|as|so|for|after|per the|i\.e\.|hence|therefore|thus|rather than)\b.*"
    r"|[,;] not (?=\S).*|,? (?:is|was) (?:the|our|my) (?:\w+ )?(?:answer|solution|result|value)\b.*",
    re.IGNORECASE | re.DOTALL,
)
RESTATED = re.compile(
    r"[,;]? (?:which is|so|hence|therefore|thus|i\.e\.|that is),? (?:it is |the answer is )?\$?(-?[\d.,/]+)\$?",
    re.IGNORECASE,
)
FORMULA = re.compile(r"\$\$?(?!\s*\d[\d,.]*\s+[a-z])([^$\n]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
NUMBER = re.compile(
    r"(?<![\w.])[-−+]?(?:[$€£¥＄]\s?)?[-−]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)\.\d+|(?<!\d)\.\d+)?"
    r"(?<=\d)(?:\s?/\s?\d+)?(?:\s?\\?%)?"
)
INLINE_MATH = re.compile(
    r"\$\$?([^$\n]{1,400})\$\$?|\\\(((?:[^\\]|\\[^()]){1,400}?)\\\)|\\\[((?:[^\\]|\\[^][]){1,400}?)\\\]"
)
WORD = re.compile(
    r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|(?:is|of|to|in|so|we|he|it|as|at|by|or|on|if|an|my|be)\b)", re.IGNORECASE
)
MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
DATE = re.compile(rf"(?:({MONTHS}) (\d{{1,2}})(?:st|nd|rd|th)?|(\d{{1,2}})(?:st|nd|rd|th)?(?: of)? ({MONTHS}))", re.I)
CHOSEN = re.compile(r"\b(?:option|choice)\s*[:*]*\s*\(?([A-J])\)?(?![A-Za-z])|\(([A-J])\)", re.IGNORECASE)
JOINED = re.compile(
    r"(?:[\d)}$]|\b[A-J])\)?\s*(?:,|;|/|-|–|\bor\b|\band\b)\s*(?:(?:or|and|maybe|perhaps|possibly|option)\s+)*(?:[A-Za-z]\s?=\s?)?[($\\]*\Z",
    re.I,
)


LED = re.compile(rf"{DANGER.pattern}\s+(?:of\s+)?[$\\(]*\Z", re.IGNORECASE)
FOLLOWED = re.compile(rf"[ -]+(?:[A-Za-z]+ ){{0,2}}{DANGER.pattern}", re.IGNORECASE)


class Said(NamedTuple):
    """An answer, what it was taken for, and where it stands in the text that was searched."""

    text: str
    how: str
    start: int
    end: int


def phrase(text: str) -> Said | None:
    """What the last "the answer is" says, unless it says what the answer is not."""
    text = DOLLAR.sub(MONEY + " ", text)  # as long as before
    for match in reversed(list(ANSWER_PHRASE.finditer(text))[-TRIES:]):
        start = match.end() + len(text[match.end() :]) - len(text[match.end() :].lstrip())
        line = text[start : start + 20_000].split("\n", 1)[0]
        value, used = _leading_value(line)
        refused = re.match(r"(?:not|never|neither)\b", value, re.IGNORECASE) or not_meant(text[: match.start()])
        if value and not refused:
            inner = bare(value) if _is_sentence(value) and DANGER.search(value) is None else None
            said, how = (value, "phrase") if inner is None else (inner.text, "phrase in words")
            return Said(said.replace(MONEY, "\\$"), how, match.start(), start + used)
    return None


def _leading_value(line: str) -> tuple[str, int]:
    """The value at the start of a line, its math or the words up to the end of the sentence; and what that uses."""
    indent = len(line) - len(line.lstrip(" *\t"))
    line = re.sub(r"\s", " ", line)[indent:]
    end = SENTENCE_END.search(line)
    sentence = line if end is None else line[: end.start()]
    used = indent + (len(line) if end is None else end.start() if end.group()[0] == "?" else end.end())
    math = FORMULA.match(line)
    if math is not None:
        rest = line[math.end() : end.start()] if end is not None and end.start() > math.end() else line[math.end() :]
        rest = "" if end is not None and end.start() < math.end() else rest
        plain = CLAUSE.sub("", rest).strip(" .,!*")
        if not plain or (
            plain[0].isalpha()
            and not re.search(r"\d|\\|\$", plain)
            and not DANGER.search(plain)
            and plain[:4] != "and "
        ):
            return strip_wrappers(next(g for g in math.groups() if g)), max(used, indent + math.end())
    again = RESTATED.search(sentence)
    if again is not None and again.end() == len(sentence.rstrip(" .*")):
        sentence = f"{sentence[: again.start()]} = {again[1]}"
    sentence = CLAUSE.sub("", sentence)
    odd = sentence.count("$") % 2
    return strip_wrappers(sentence.replace("$$", "").lstrip("$") if odd else _without_dollars(sentence)), used


def _without_dollars(line: str) -> str:
    return INLINE_MATH.sub(lambda m: next(g for g in m.groups() if g), line) if "$" in line or "\\(" in line else line


def bare(text: str) -> Said | None:
    """The whole text where it is a value itself; else the last formula, number, or choice letter of its end.

    None where the last value is denied, or is one of several.
    """
    text = DOLLAR.sub(MONEY + " ", text)
    found = _bare(text)
    return found and found._replace(text=found.text.replace(MONEY + " ", "\\$").replace(MONEY, "\\$"))


def _bare(text: str) -> Said | None:
    whole = strip_wrappers(text)
    words = len(_prose_words(whole)) if len(whole) <= 2000 else 99
    if REFUSAL.match(whole) and not re.search(r"\d", whole) and CHOSEN.search(whole) is None:
        return None
    everything = Said(whole, "whole text", 0, len(text))
    if whole and (words == 0 or (words <= 2 and "\n" not in whole)) and not _is_sentence(whole):
        return everything
    lines = [line for line in text.split("\n") if line.strip()]
    for line in reversed(lines[-3:]):
        start = text.rindex(line)
        formulas = list(INLINE_MATH.finditer(line))
        numbers = [m for m in list(NUMBER.finditer(line))[-4 * TRIES :] if m.group().strip()]
        chosen = list(CHOSEN.finditer(line))
        if not (formulas or numbers or chosen):
            continue
        last = max((kind[-1] for kind in (formulas, numbers) if kind), key=lambda m: m.end(), default=None)
        how = "last choice" if last is None else "last formula" if formulas and last is formulas[-1] else "last number"
        return _last(line, start, last or chosen[-1], how, len(numbers))
    number = next((m for m in reversed(list(NUMBER.finditer(text))) if m.group().strip()), None)
    if number is not None:
        return _last(text, 0, number, "last number", 1)
    return everything if 0 < len(whole) <= 60 and not _is_sentence(whole) else None


def _last(line: str, start: int, found: re.Match[str], how: str, numbers: int) -> Said | None:
    """A line's last value, with the words beside it that may change it; None where the line does not stand by it."""
    before = line[max(0, found.start() - NEAR) : found.start()]
    sentence = re.split(r"[.!?]\s", before)[-1]
    if denied(before):
        within = NUMBER.finditer(line, max(0, found.start() - NEAR), found.start())
        earlier = [m for m in within if m.group().strip() and not denied(line[: m.start()])]
        other = earlier[-1] if earlier and earlier[-1].group().strip() != found.group().strip() else None
        return None if other is None else _last(line[: other.end()], start, other, "last number", numbers - 1)
    after = line[found.end() :]
    beside = before.rstrip(" $\\(")[-1:] + after.lstrip(" $\\)*")[:1]
    whole = not before.strip() and not re.match(r"\s*[+*/^<>=×÷·]", after)
    if how == "last number" and not whole and re.search(r"[\d+*/^<>×÷·}{&)]|\\", beside):
        return None  # it is a part of something
    if (
        not_meant(sentence)
        or JOINED.search(before)
        or (numbers > 1 and HEDGE.search(sentence) and re.search(r"\d", sentence))
    ):
        return None
    led, follows = LED.search(before), FOLLOWED.match(after)
    value = next((g for g in found.groups() if g), found.group()) if found.groups() else found.group()
    if how != "last choice" and (led is not None or follows is not None):
        end = SENTENCE_END.search(after)
        value = (led.group() if led else "") + value + (after if end is None else after[: end.start()])
    return Said(strip_wrappers(value.strip()), how, start + found.start(), start + found.end())


def _is_sentence(text: str) -> bool:
    """Do words lead up to a number, formula, or choice letter, other than a label such as "Area ="?"""
    if DATE.fullmatch(text) is not None:
        return False
    if re.match(r"\d+ [a-z]+ \d+ (?:is|are|equals|makes) ", text):
        return True
    if re.match(r"(?:[A-Za-z]{2,}|I)[ ,]", text) is None or len(text) > 2000 or not digits(text)[:1].isalpha():
        return False
    if SENTENCE_END.search(text[:-1]) is None and re.match(
        r"(?!let\b)[A-Za-z]{2,}(?: [A-Za-z]+){0,3} ?=[^=]*$", text, re.I
    ):
        return False
    valued = re.search(r"\d|\\[a-z]|\$", text) is not None and WORD.search(text) is not None
    return valued or CHOSEN.search(text) is not None


def _prose_words(text: str) -> list[str]:
    return WORD.findall(re.sub(r"\\(?:text|mathrm|textbf|operatorname|mbox|begin|end)\s*\{[^{}]*\}", "", text))
