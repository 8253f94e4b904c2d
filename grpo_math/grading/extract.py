r"""A completion -> the text of its answer: where the answer stands, and nothing about what it means.

A marker that the asked format names comes first; then, in any format: the last ``<answer>`` tag, the last box or
``####`` line, a phrase such as "the answer is", and at last a bare value. What stands before ``</think>`` is never an
answer. Every search runs from the end and in linear time, since completions can be hostile.

>>> extract("3 + 4 = 7\n#### 7").text, extract(r"so \boxed{\frac{1}{2}}").text, extract("The answer is $5.").text
('7', '\\frac{1}{2}', '5')

Does not compare, and does not clean a value beyond the punctuation around it.
"""

import re
from typing import NamedTuple

TAIL = 20_000  # characters from the end in which phrases and bare values are looked for
BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])\s*")
FINAL = re.compile(r"final answer\s*(?:is\b|[:：=])", re.IGNORECASE)
BOLD = re.compile(r"(?<![\w)\]}*])\*\*(?=\S)([^*\n]{1,300}?)(?<=\S)\*\*(?![\w(*])")
REFUSAL = re.compile(r"(?:I|We|Sorry|Unfortunately)[ ,']", re.IGNORECASE)
NEGATED = re.compile(r"(?:\bnot|n't)\s{1,3}(?:be\s{1,3})?$", re.IGNORECASE)
EMPTY_TAG = re.compile(r"<answer>\s*</answer>")
BRACE = re.compile(r"[{}]|\\.", re.DOTALL)
EMPTY_BOX = re.compile(r"\\f?box(?:ed)?\s*\{\s*\}")
ANSWER_PHRASE = re.compile(
    r"(?:\banswers?\b|\b(?:correct|right|final) (?:option|choice|value)\b|答案|\bresult\b|\bsolution\b)"
    r"[ \t]{0,9}(?:\([^()\n]{0,60}\)[ \t]{0,9})?"
    r"(?:(?:to|for|of|in)\b[^.:=\n]{0,80}?)?[*_\s]{0,4}"
    r"(?:\bis\b|\bare\b|\bwould be\b|\bmust be\b|\bequals\b|[:：=是为])"
    r"[*_\s]{0,4}(?:(?:simply|just|therefore|thus|equal to|exactly|option|choice|indeed|given by)\b)?[:：*_\s]{0,4}",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"(?<!\b[A-Z])[.!?](?:[\"')*\]]*)(?=\s|$)")
CLAUSE = re.compile(
    r"[,;]? (?:because|since|which|where|when|as|so|for|after|per the|i\.e\.|hence|therefore|thus|not|rather than)\b.*"
    r"|[,;] (?:but|then)\b.*",
    re.IGNORECASE | re.DOTALL,
)
NUMBER = re.compile(
    r"(?<![\w.])[-−+]?(?:[$€£¥]\s?)?[-−]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)\.\d+|(?<!\d)\.\d+)?"
    r"(?<=\d)(?:\s?/\s?\d+)?(?:\s?\\?%)?"
)
INLINE_MATH = re.compile(r"\$\$?([^$\n]{1,400})\$\$?|\\\((.{1,400}?)\\\)|\\\[(.{1,400}?)\\\]", re.DOTALL)
HEADING = re.compile(
    r"(?:step|part|solution|explanation|conclusion|final answer|answer|summary)\b[^\d$\\]*\d{0,2}[.:]?\s*$", re.I
)
WORD = re.compile(
    r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|(?:is|of|to|in|so|we|he|it|as|at|by|or|on|if|an|my|be)\b)", re.IGNORECASE
)
CHOSEN = re.compile(r"\b(?:option|choice)\s*[:*]*\s*\(?([A-J])\)?(?![A-Za-z])|\(([A-J])\)", re.IGNORECASE)


class Extraction(NamedTuple):
    """``text`` is None where there is no answer; ``how`` names what was found; ``boxes`` are all boxes of the end."""

    text: str | None
    how: str
    boxes: tuple[str, ...] = ()


def extract(completion: str, answer_format: str | None = None) -> Extraction:
    r"""The answer of a completion.

    >>> extract(r"<think>\boxed{3}</think> The answer is 4.")
    Extraction(text='4', how='phrase', boxes=())
    >>> extract("<answer>8</answer>\n#### 7", "gsm8k").text, extract("<answer>8</answer>\n#### 7", "xml").text
    ('7', '8')
    >>> extract("I cannot say.").text is None
    True
    """
    visible = _after_thinking(completion)
    finders = {"gsm8k": _hashes, "boxed": _boxed, "r1_zero": _tagged, "xml": _tagged}
    named = finders.get(answer_format or "")
    found = named(visible) if named is not None else None
    found = found or _tagged(visible) or _conclusion(visible) or _box_or_hashes(visible)
    if found is not None:
        return found
    tail = BOLD.sub(r"\1", visible[-TAIL:])
    without = EMPTY_TAG.sub(" ", EMPTY_BOX.sub(" ", tail))
    if without != tail:
        return _phrase(without) or Extraction(None, "empty box")
    return _phrase(tail) or _bare(tail) or Extraction(None, "nothing")


def extract_gold(gold: str) -> Extraction:
    r"""The gold answer: what its last marker holds, or the whole text where it has none.

    >>> extract_gold("48 + 24 = 72\n#### 72").text, extract_gold(r"so $\boxed{3}$").text, extract_gold(" x=5 ").text
    ('72', '3', 'x=5')
    """
    found = _boxed(gold) or _hashes(gold) or _tagged(gold)
    if found is None and BOX.search(gold[-TAIL:]):
        return Extraction(None, "empty box")
    return found or Extraction(strip_wrappers(gold) or None, "whole text")


def strip_wrappers(text: str) -> str:
    r"""Without the punctuation, bold marks, and dollar signs around a value.

    >>> strip_wrappers(" **$42$.** "), strip_wrappers(r"\[ x^2 \]"), strip_wrappers("`5`")
    ('42', 'x^2', '5')
    """
    before = None
    text = text.strip()
    while before != text:
        before = text
        text = text.strip().strip('`"“”').strip()
        while len(text) > 1 and text[-1] in ".,;:?。" and not text.endswith(("\\,", "\\;", "\\:")):
            text = text[:-1].rstrip()
        for opening, closing in (("**", "**"), ("__", "__"), ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            inner = text[len(opening) : -len(closing)]
            enclosed = text.startswith(opening) and text.endswith(closing) and len(text) > 2 * len(opening)
            if enclosed and opening not in inner:
                text = inner
    return text


def _after_thinking(completion: str) -> str:
    _, end, visible = completion.rpartition("</think>")
    return visible if end else completion.partition("<think>")[0]


def _tagged(text: str) -> Extraction | None:
    end = len(text)
    for _ in range(8):
        end = text.rfind("</answer>", 0, end)
        if end < 0:
            return None
        start = text.rfind("<answer>", 0, end)
        if start < 0:
            return None
        inner = text[start + len("<answer>") : end].strip()
        if inner:
            found = _box_or_hashes(inner) or _phrase(inner[-TAIL:]) or Extraction(strip_wrappers(inner), "")
            return found._replace(how="answer tag")
        end = start
    return None


def _hashes(text: str) -> Extraction | None:
    end = len(text)
    for _ in range(8):
        end = text.rfind("####", 0, end)
        if end < 0:
            return None
        line = text[end + 4 :].lstrip("#").split("\n", 1)[0].strip()
        phrase = ANSWER_PHRASE.match(line)
        line = strip_wrappers(line if phrase is None else line[phrase.end() :])
        if line and not (len(line) < 80 and HEADING.fullmatch(line)):
            return Extraction(line, "####")
    return None


def _box_or_hashes(text: str) -> Extraction | None:
    boxed, hashes = _boxed(text), _hashes(text)
    if boxed is None or hashes is None:
        return boxed or hashes
    heading = re.match(r"[-−+$\\(\[.\d]", hashes.text or "") is None  # "#### Step 3" is a heading
    return boxed if heading or text.rfind("box") > text.rfind("####") else hashes


def _boxed(text: str) -> Extraction | None:
    """The last box that is not empty."""
    starts = list(BOX.finditer(text, max(0, len(text) - 10 * TAIL)))
    boxes: list[str] = []
    last_start = len(text)
    for match in reversed(starts[-12:]):
        content, end = _box_content(text, match.end())
        if not content:
            continue
        if boxes and not _joined(text[end:last_start]):
            break
        boxes.append(content)
        last_start = match.start()
    if not boxes:
        return None
    last = boxes[0]
    if "nswer" in last:  # "the answer is 7" inside the box
        phrased = _phrase(re.sub(r"\\text\w*\s*\{([^{}]*)\}", r"\1", last))
        last = phrased.text if phrased is not None and phrased.text else last
    return Extraction(last, "box", tuple(reversed(boxes)))


def _joined(between: str) -> bool:
    """Are two boxes parts of one answer? Only commas, "and", and a few words such as units stand between them."""
    if len(between) > 60:
        return False
    plain = re.sub(r"\\(?:q?quad|text|mathrm|[,;: ()\[\]])|[{}]", " ", between)
    listed = re.search(r",|;|\band\b|\bor\b|&", plain) is not None or not plain.strip(" $")
    return listed and re.fullmatch(r"[A-Za-z\s$,;&]*", plain) is not None and len(plain.split()) <= 6


def _box_content(text: str, start: int) -> tuple[str, int]:
    r"""What a box holds and where it ends; a box that never closes holds the rest of its line."""
    if start >= len(text):
        return "", start
    if text[start] != "{":
        match = re.compile(r"[^\s$]+").match(text, start)
        return (strip_wrappers(match.group()), match.end()) if match else ("", start)
    depth = 0
    for match in BRACE.finditer(text, start):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
            if depth == 0:
                return strip_wrappers(text[start + 1 : match.start()]), match.end()
    line = text[start + 1 :].split("\n", 1)[0]
    return strip_wrappers(line.rstrip("$ .")), start + 1 + len(line)


def _conclusion(text: str) -> Extraction | None:
    """The value that a "final answer" sentence gives after the last box, which was then an interim result."""
    last = text.rfind("box")
    sentences = list(FINAL.finditer(text, max(last, len(text) - TAIL))) if last >= 0 else []
    found = _phrase(BOLD.sub(r"\1", text[sentences[-1].start() :])) if sentences else None
    return found if found is not None and re.search(r"\d|\\", found.text or "") else None


def _phrase(text: str) -> Extraction | None:
    for match in reversed(list(ANSWER_PHRASE.finditer(text))):
        rest = text[match.end() :].lstrip()
        if value := _leading_value(rest.split("\n", 1)[0]):
            inner = _bare(value) if _is_sentence(value) else None
            return Extraction((inner and inner.text) or value, "phrase")
    return None


def _leading_value(line: str) -> str:
    """The value at the start of a line: its math, or the words up to the end of the sentence."""
    line = re.sub(r"\s+", " ", line).strip().strip("*").strip()
    math = re.match(r"\$\$?(?!\s*\d[\d,.]*\s+[a-z])([^$\n]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", line)
    if math is not None:
        rest = line[math.end() :].strip(" .,!*")
        if not rest or not re.match(r"(?:and|or|,|%|\\%|\$|°|:|to\b)", line[math.end() :].strip()):
            return strip_wrappers(next(g for g in math.groups() if g))
    end = SENTENCE_END.search(line)
    if end is not None:
        line = line[: end.start()]
    line = CLAUSE.sub("", line)
    return strip_wrappers(line.replace("$$", "").lstrip("$") if line.count("$") % 2 else _without_dollars(line))


def _without_dollars(line: str) -> str:
    return INLINE_MATH.sub(lambda m: next(g for g in m.groups() if g), line) if "$" in line or "\\(" in line else line


def _bare(text: str) -> Extraction | None:
    """The whole text where it is a value itself; else the last formula, number, or choice letter of its end."""
    whole = strip_wrappers(text)
    words = len(_prose_words(whole)) if len(whole) <= 2000 else 99
    if REFUSAL.match(whole) and not re.search(r"\d", whole) and CHOSEN.search(whole) is None:
        return None
    if whole and (words == 0 or (words <= 2 and "\n" not in whole)) and not _is_sentence(whole):
        return Extraction(whole, "whole text")
    lines = [line for line in whole.split("\n") if line.strip()]
    for line in reversed(lines[-3:]):
        formulas = list(INLINE_MATH.finditer(line))
        numbers = _numbers(line)
        if formulas and (not numbers or formulas[-1].end() >= numbers[-1].end()):
            return Extraction(strip_wrappers(next(g for g in formulas[-1].groups() if g)), "last formula")
        if numbers:
            return Extraction(numbers[-1].group().strip(), "last number")
        chosen = list(CHOSEN.finditer(line))
        if chosen:
            return Extraction(next(g for g in chosen[-1].groups() if g), "last choice")
    numbers = _numbers(whole)
    if numbers:
        return Extraction(numbers[-1].group().strip(), "last number")
    return Extraction(whole, "whole text") if 0 < len(whole) <= 60 and not _is_sentence(whole) else None


def _numbers(text: str) -> list[re.Match[str]]:
    """All that are not denied, as in "it is not 5"."""
    found = [m for m in NUMBER.finditer(text) if m.group().strip()]
    return [m for m in found if not NEGATED.search(text[max(0, m.start() - 9) : m.start()])]


def _is_sentence(text: str) -> bool:
    """Do words lead up to a number, formula, or choice letter, other than a label such as "Area ="?"""
    if re.match(r"(?:[A-Za-z]{2,}|I)[ ,]", text) is None or len(text) > 2000:
        return False
    if SENTENCE_END.search(text[:-1]) is None and re.match(
        r"(?!let\b)[A-Za-z]{2,}(?: [A-Za-z]+){0,3} ?=[^=]*$", text, re.I
    ):
        return False
    valued = re.search(r"\d|\\[a-z]|\$", text) is not None and WORD.search(text) is not None
    return valued or CHOSEN.search(text) is not None


def _prose_words(text: str) -> list[str]:
    return WORD.findall(re.sub(r"\\(?:text|mathrm|textbf|operatorname|mbox|begin|end)\s*\{[^{}]*\}", "", text))
