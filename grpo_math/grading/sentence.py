r"""Text without a marker -> its answer: "the answer is X", a bare value, or the last value of the last sentence.

>>> phrase("The answer is $5."), bare("So she sells 42 apples.")
(Said(text='5', how='phrase', start=4, end=17), Said(text='42', how='last number', start=13, end=15))
>>> bare("It is 5 or 6."), bare("I think 5, or maybe 6 of them.")
(Said(text='5 or 6', how='last line', start=0, end=13), None)

Does not look at boxes, ``####`` and tags (extract.py).
"""

import re
from typing import NamedTuple

from grpo_math.grading.below import ends, leaves_alone
from grpo_math.grading.beside import (
    FACTOR,
    INLINE_MATH,
    LED,
    MEASURED,
    OF_WHAT,
    SUMMED,
    among_formulas,
    followed,
    measure,
    part_of_more,
    power,
)  # fmt: skip
from grpo_math.grading.commit import DANGER, HEDGE, denied, denied_from, not_meant
from grpo_math.grading.equated import MONEY, VERB, members_before
from grpo_math.grading.expression import FUNCTIONS
from grpo_math.grading.spelled import digits
from grpo_math.grading.steps import last_step
from grpo_math.grading.text import DOLLAR, strip_wrappers
from grpo_math.grading.units import canonical

TRIES = 12  # the last phrases that are looked into
NEAR = 200  # characters before a bare value that are looked at
REFUSAL = re.compile(r"(?:I|We|Sorry|Unfortunately)[ ,']", re.IGNORECASE)
ANSWER_PHRASE = re.compile(
    r"(?:\banswers?\b|\b(?:correct|right|final) (?:option|choice|value)\b|答案|\bresult\b|\bsolution\b)"
    r"[ \t]{0,9}(?:\([^()\n]{0,60}\)[ \t]{0,9})?"
    r"(?:(?:to|for|of|in)\b[^.:=\n]{0,80}?)?[*_\s]{0,4}"
    r"(?:\bis\b|\bare\b|\bwould be\b|\bmust be\b|\bequals\b|[:：=是为])"
    r"[*_\s]{0,4}(?:(?:simply|just|therefore|thus|equal to|exactly|option|choice|indeed|given by)\b)?[:：*_\s]{0,4}",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(
    r"(?<!\b[A-Z])(?<!\b[apAP]\.[mM])(?<!\be\.g)(?<!\bi\.e)"
    r"(?<!\\)(?:[.?](?!(?<=\.\.\.)[\"')*\]]*\s+[a-z\d\\$.*])|!(?![\"')*\]]*(?: +[a-z;,]| *\\[a-z])))"
    r"(?!\s*=)(?:[\"')*\]]*)(?=\s|$)"
)
CLAUSE = re.compile(
    r"[,;]? (?:because|since|which|where|when|as|so|for|after|per the|i\.e\.|hence|therefore|thus|rather than)\b.*"
    r"|(?<!\\)[,;] not (?=\S).*|,? (?:is|was) (?:the|our|my) (?:\w+ )?(?:answer|solution|result|value)\b.*",
    re.IGNORECASE | re.DOTALL,
)
RESTATED = re.compile(
    r"[,;]? (?:which is|so|hence|therefore|thus|i\.e\.|that is),? (?:it is |the answer is )?\$?(-?[\d.,/]+)\$?",
    re.IGNORECASE,
)
FORMULA = re.compile(r"\$\$?(?!\s*\d[\d,.]*\s+[a-z])([^$\n]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
NUMBER = re.compile(
    r"(?<![\w.^])[-−+]?(?:[$€£¥＄]\s{0,2})?[-−]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)\.\d+|(?<!\d)\.\d+)?"
    r"(?<=\d)(?:\s?/\s?\d+|(?::\d+)+)?(?!\.?\d)(?:\s?\\?%)?"
)
WORD = re.compile(
    r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|(?:is|of|to|in|so|we|he|it|as|at|by|or|on|if|an|my|be)\b)", re.IGNORECASE
)
MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
DATE = re.compile(rf"(?:({MONTHS}) (\d{{1,2}})(?:st|nd|rd|th)?|(\d{{1,2}})(?:st|nd|rd|th)?(?: of)? ({MONTHS}))", re.I)
CHOSEN = re.compile(r"\b(?:option|choice)\s*[:*]*\s*\(?([A-J])\)?(?![A-Za-z])|\(([A-J])\)", re.IGNORECASE)
JOINED = re.compile(
    r"(?:[\d)}$%°]|(?<!\\)\]|\\pi|\\circ|\b[A-J])\)?[\s(]*(?:\\text\s*\{\s*)?(?:,|;|/|-|–|\\(?:q?quad|lor|land|vee|wedge)\b|\bor\b|\band\b)\s*\}?\s*(?:(?:or|and|maybe|perhaps|possibly|option)\s+)*\}?\s*(?:[A-Za-z]\s?=\s?)?(?:[(\[$\\]|＄\s*|text\s*\{\s*|approx\s*)*\Z",
    re.I,
)
_STATES = re.compile(
    r"(?:(?:so|thus|hence|therefore|then|and),? )?"
    r"(?:(?:it|this|that)(?: is|'s| was|equals)|we (?:get|have)|[A-Za-z]\s?=)\s*",
    re.IGNORECASE,
)
_LINK = re.compile(
    r"[\s,;:=#%&|/~`\"'*$({\[-]*(?:(?:also|or|and|perhaps|maybe)\b)?[\s,:$({\[*]*(?:[A-Za-z]\s?=\s*)?", re.IGNORECASE
)
_LABEL = re.compile(r"[A-Z][A-Za-z ]{0,30}(?:\d{1,2}:\s|:)\s*(?=[\d$(.\\-])|\d{1,2} [A-Z][a-z]+:\s*(?=\d)")
_LEADING = re.compile(r"\s*(?:[A-Za-z]{2,}[ ,:]+){1,4}(?=[^A-Za-z\s,:])(?!\d+\s*[,:;])")  # words before a value
_ASIDE = re.compile(r"\\text\s*\{[^{}]*\}\Z")
_NOUN = re.compile(r"(?<=[\d%])(?: [A-Za-z]{2,}){1,3}\Z")
_ABBREVIATED = re.compile(r"\b(?:sq|ft|in|yd|mi|hrs?|mins?|secs?|lbs?|oz|no|vs|[ap]\.m)\.\s*\Z", re.IGNORECASE)
_OF_VALUES = re.compile(rf"{DANGER.pattern}|\b(?:also|and|or|some|others|would|say)\b", re.IGNORECASE)
_BEGINS = re.compile(r"\s*(?:(?:[!?.,;]+|and|or)\s+)*")  # before a value: "The answer is ... 5"
_ASKS = re.compile(r"\A[^.!?]{0,80}[\d)}]\?[\s$*)]*\Z")  # one sentence, a value in question
_LETTERS = re.compile(
    r"\{[A-J]{2,}\}|\b[A-J]{1,2}\b(?:\W*(?:,|\band\b|\bor\b)\W*|\s?/\s?)\b[A-J]{1,2}\b"
)  # several choices
_VALUED = re.compile(  # a line that cannot be passed over
    r"\d|\\\{|(?<!\w)\{[A-Za-z ]*,|[_^]\{|\\(?:text|[dt]?frac|sqrt|pi|infty)(?![A-Za-z])"
    r"|\A\s*(?:[A-Za-z]\s?=|(?i:not|never|neither|all but)\b)|(?i:\b(?:any|every)thing but\b|\bnon-)"
)
_REPORTED = re.compile(r"\W*(?:others?|some|they|people|had|if|compare|the (?:problem|book|text))\b", re.IGNORECASE)
_DENIES = re.compile(r"(?:not|never|neither)\b", re.IGNORECASE)
_OTHERS_NOT = re.compile(  # of something else: "the students who did not come"
    r"\b(?:who|that|which) (?:[a-z]+ ){0,3}?(?:[a-z]+n['’]t|not)\b|\d [a-z]+ (?:were|was|are|did|do|have|had) not\b",
    re.I,
)
_OF_A_NAME = re.compile(r"(?:values|integers|numbers) (?:of|for) \$[a-z][.,]?\$[\s.]*\Z")  # "6 possible values of $x$"
_LETTER = re.compile(r"\W*(?:text\W*)?[A-J]\W*")
_GOES_ON = re.compile(r"\s*[a-z]{2,} [^\n]*[\d\\]")  # a sentence, in the next line
_LINE = re.compile("\n")
_LINES = re.compile(
    r"\n|(?<=\\\])(?=\s*(?:[A-Z][a-z]|(?:and|so|we) ))|(?<=\\end\{align\*\})(?=\s*[A-Za-z])"
)  # a display ends one
_CLOSED = re.compile(r"(?:[\s.!*]|\\end\s*\{\w+\*?\}|\\[])]|\$\$)*\Z")
_WORKING = re.compile(r"&|<answer>|####|\\\\f?box|\[/?asy\]|\\(?:right|end|equiv|square|[cd]?dots\w?)\b")
_LEADS = re.compile(rf"[\s$({{\[*-]*(?:[\d\\]|{DANGER.pattern})", re.IGNORECASE)


_VALUES = re.compile(r"\d|\\(?:text|d?frac|sqrt|pi)")
_NAMES = re.compile(r"(?<![A-Za-z\\.])(?!Q\.?E\.?D)[A-Za-z]")  # in a formula, and not "\blacksquare" or "QED"


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
        start = _BEGINS.match(text, match.end()).end()  # type: ignore
        line, _, below = text[start : start + 20_000].partition("\n")
        value, used = _leading_value(line)
        goes_on = re.search(r"[\w}]\s*\Z", line) and _GOES_ON.match(below) and not CLAUSE.match(f" {below}")
        refused = goes_on or _DENIES.match(value) or not_meant(text[: match.start()] + match.group().split()[0])
        if value and not refused:
            whole = f"{value}." if value.endswith("!") else value  # its stop was another: no exclamation
            inner = bare(whole) if _is_sentence(value) and DANGER.search(value) is None else None
            said, how = (value, "phrase") if inner is None else (inner.text, "phrase in words")
            return Said(said.replace(MONEY, "\\$"), how, match.start(), start + used)
    return None


def conclusion(text: str) -> Said | None:
    """What the last sentence says that is an answer and hardly more: "It is 5", "x = 5", "twice 5".

    >>> conclusion("We add. It is $5$."), conclusion("She has 3 friends and likes them.")
    (Said(text='5', how='phrase', start=14, end=17), None)
    """
    ends = [m.end() for pattern in (SENTENCE_END, _LINE) for m in pattern.finditer(text)]
    stop = len(text)
    for start in sorted({0, *ends}, reverse=True)[:TRIES]:
        if text[start:stop].rstrip(" \n\"')*]").endswith("?"):
            return None
        if text[start:stop].strip() and _REPORTED.match(text, start, stop) is None:
            return _stated(text, start, stop)
        stop = start
    return None


def _stated(text: str, start: int, stop: int) -> Said | None:
    """The same of one sentence."""
    closed = _CLOSED.search(text[start:stop])
    stop = stop if closed is None else start + closed.start()
    start += len(text[start:stop]) - len(text[start:stop].lstrip())
    states = _STATES.match(text, start, stop)
    begin = start if states is None else states.end()
    said = text[begin:stop]
    if (
        len(said) > 300
        or not (_VALUES.search(said) or (FORMULA.fullmatch(said) and _NAMES.search(said)))
        or _WORKING.search(said)
    ):
        return None
    if text[:start].rstrip().endswith(":") or (states is None and "=" in said and not said.startswith("\\{")):
        return None  # a list of what was counted, or a check
    if len(_prose_words(said)) > (4 if _LEADS.match(said) is not None else 2):
        return None
    return Said(strip_wrappers(_without_dollars(said)), "phrase", begin, stop)


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
        if (
            not plain
            or (
                plain[0].isalpha()
                and not rest[:1].isalpha()  # \(x\)non-x
                and not re.search(r"\d|\\|\$", plain)
                and not DANGER.search(plain)
                and plain[:4] != "and "
            )
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
    step = last_step(whole) if words <= 2 else None
    if step is not None:
        return everything._replace(text=_without_noun(step), how="last step")
    if whole and (words == 0 or (words <= 2 and "\n" not in whole)) and not _is_sentence(whole):
        return everything
    displayed = "\\]" in text or "\\end" in text
    lines = [line for line in (_LINES.split(text) if displayed else text.split("\n")) if line.strip()]
    asked = below = False
    for line in reversed(lines[-3:]):
        start = text.rindex(line)
        formulas = list(INLINE_MATH.finditer(line))
        if len(formulas) > 1 and _OF_A_NAME.search(line, formulas[-2].end()) is not None:
            formulas.pop()
        numbers = [m for m in list(NUMBER.finditer(line))[-4 * TRIES :] if m.group().strip()]
        chosen = list(CHOSEN.finditer(line))
        valued = _VALUED.search(line) or ANSWER_PHRASE.search(line)
        if _ASKS.search(line) is not None:
            asked = True
            continue
        if asked and HEDGE.search(line) is not None:  # "It could be 5." and a question
            return None
        if not (formulas or numbers or chosen or valued or _LETTERS.search(line)):
            if len(lines) > 1 and not ends(line):
                below = True
                if not leaves_alone(line):
                    return None
            continue
        value = _line_value(line) if _is_value_line(line) else None
        if value is not None and _DENIES.match(value) is None:
            if below and re.search(r"\d", value) is None:  # the words may say something else
                return None
            return Said(value, "last line", start, start + len(line))
        if not (formulas or numbers or (chosen and not below)):  # the words may say something else
            return None
        last = max((kind[-1] for kind in (formulas, numbers) if kind), key=lambda m: m.end(), default=None)
        if below and last is not None and re.search(r"\d", last.group()) is None:
            return None
        how = "last choice" if last is None else "last formula" if formulas and last is formulas[-1] else "last number"
        last = (_result(line, numbers) if how == "last number" else None) or last
        return _last(line, start, last or chosen[-1], how, len(numbers), text[:start])
    number = next((m for m in reversed(list(NUMBER.finditer(text))) if m.group().strip()), None)
    if number is not None:
        return _last(text, 0, number, "last number", 1)
    return everything if 0 < len(whole) <= 60 and not _is_sentence(whole) else None


def _result(line: str, numbers: list[re.Match[str]]) -> re.Match[str] | None:
    """The result of the last sum of a line, where the numbers behind it only say how long or of what.

    >>> line = "So he makes 3 + 4 = 7 dollars in 5 days."
    >>> _result(line, list(re.finditer(r"\\d", line))).group()
    '7'
    """
    for number in reversed(numbers[:-1]):
        before = line[max(0, number.start() - NEAR) : number.start()]
        if before.rstrip(f" ${MONEY}").endswith("="):
            return number if SUMMED.search(before) and OF_WHAT.fullmatch(line, number.end()) else None
    return None


def _last(line: str, start: int, found: re.Match[str], how: str, numbers: int, above: str = "") -> Said | None:
    """A line's last value, with the words beside it that may change it; None where the line does not stand by it."""
    before = line[max(0, found.start() - NEAR) : found.start()]
    sentence = re.split(r"[.!?]\s", before)[-1]
    denial = denied_from(before)
    if denial is not None:
        stop = found.start() - len(before) + denial
        within = NUMBER.finditer(line, max(0, stop - NEAR), stop)
        earlier = [m for m in within if m.group().strip() and not denied(line[: m.start()])]
        if line[:stop][-1:].isalnum():  # "5not 6"
            return None
        other = earlier[-1] if earlier and _digits(earlier[-1]) != _digits(found) else None
        return None if other is None else _last(line[:stop], start, other, "last number", numbers - 1)
    after = line[found.end() :]
    factor = FACTOR.match(after) if how == "last number" else None
    factored = factor.group() if factor is not None else power(after) if how == "last number" else ""
    after = after[len(factored) :]
    if part_of_more(before, after, how):
        return None
    end = SENTENCE_END.search(after)
    summed = SUMMED.search(before) is not None
    equation = summed or (how == "last formula" and "=" in found.group())
    if (
        not_meant(_OTHERS_NOT.sub(" ", sentence) if equation else sentence)
        or JOINED.search(before)
        or (HEDGE.search(sentence) and (how == "last choice" or (numbers > 1 and re.search(r"\d", sentence))))
        or (end is not None and "?" in end.group())
    ):
        return None
    clause = after if end is None else after[: end.start()]
    prose = ("", f"){clause}") if how == "last formula" else (sentence, found.group() + clause)
    value = next((g for g in found.groups() if g), found.group()) if found.groups() else found.group()
    if among_formulas(*prose) or (_LETTER.fullmatch(value) and part_of_more("", after, "last choice")):
        return None
    value += factored
    led = LED.search(before + " " if before[-1:].isalpha() else before)
    measured = MEASURED.match(after)
    if how != "last choice" and (led is not None or followed(after, summed)):
        value = (led.group() if led else "") + value + clause
    elif measured is not None and canonical(measured[1]) is not None:
        value += measured.group()
    elif how == "last number":
        value += measure(after)
    in_formula = line.count("$", 0, found.start()) % 2 == 1 and "$" in after
    members = (
        members_before(before, found.group() + factored, after, in_formula, summed) if how == "last number" else []
    )
    if members is None:
        return None
    if members:
        value = re.sub(r"[$＄]\s?", "", " = ".join([*members, value]))
    value = strip_wrappers(value.strip())
    stated = (above[-NEAR:] if re.search("[a-z%#]", sentence) else "") + before[: len(before) - len(sentence)]
    # A fragment: it may repeat what the sentence before says.
    if stated.strip() and _ABBREVIATED.search(stated) is None and _LINK.fullmatch(sentence):
        said = conclusion(stated)
        if said is not None and said.text != value:
            return None
    return Said(value, how, start + found.start(), start + found.end())


def is_short(text: str) -> bool:
    """Is it a value with the few words that may change it, as in "square root of 7"?"""
    return len(text) <= 200 and re.search(r"\d|\\[a-z]", text) is not None and len(_prose_words(text)) <= 4


def _is_value_line(line: str) -> bool:
    """Does a line hold values and hardly a word that is not of them? Then all of it is the answer."""
    states = _STATES.match(line)
    said = line if states is None else line[states.end() :]
    if len(_prose_words(said)) > 2 and len(_prose_words(_OF_VALUES.sub(" ", said))) > 2:
        return False
    starts = states is not None or _LEADS.match(said) is not None or _led_up(said) > 0
    return (starts and VERB.search(said) is None) or not _is_sentence(line.strip())


def _led_up(said: str) -> int:
    """How long the words are that lead up to a value, behind which nothing stands but values.

    >>> _led_up("up to 5 hours"), _led_up("about 4 = 5"), _led_up("So 2 hours = 120 minutes"), _led_up("half of 4 = 5")
    (6, 6, 0, 0)
    """
    words = _LEADING.match(said)
    if (
        words is None
        or re.search(r"\w of\s*\Z|n(?:ever|ot)\b", words.group(), re.IGNORECASE)
        or _OF_VALUES.search(words.group()) is not None
    ):
        return 0
    values = _ASIDE.sub("", said[words.end() :].rstrip(" .*")).rstrip()
    values = _OF_VALUES.sub(" ", _NOUN.sub("", values))
    function = words.group().split()[-1] in FUNCTIONS
    return 0 if function or _prose_words(values) or DATE.match(said) is not None else words.end()


def _line_value(line: str) -> str:
    """A line with hardly a word: without its label, and without a noun behind its number that is no unit.

    >>> _line_value("Total: 3+4=7 Oreos."), _line_value("It is 5 or 6."), _line_value("x = 5 radians")
    ('3+4=7', '5 or 6', '5 radians')
    """
    label = _LABEL.match(line) or _STATES.match(line)
    said = line if label is None else line[label.end() :]
    step = last_step(said.rstrip(" ."))
    if step is not None:
        return _without_noun(step)
    words = _led_up(said)
    said = strip_wrappers(_without_dollars(said[words:].rstrip("! ") if words else said))
    return _without_noun(re.sub(r"(?<=[\d)}%]), not [^,;]*\Z", "", said))  # "5, not 6"


def _without_noun(said: str) -> str:
    """Without a noun behind a number that is no unit."""
    noun = _NOUN.search(said)
    if noun is None or DANGER.search(noun.group()) is not None or canonical(noun.group().strip()) is not None:
        return said
    return said[: noun.start()] + measure(noun.group())


def _digits(number: re.Match[str]) -> str:
    return re.sub(r"[^\d.]", "", number.group())


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
