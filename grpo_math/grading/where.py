r"""Find the answer of a completion, by its position and never by the meaning of the text around it.

A policy that knows the answer gains nothing by writing odd things around it. A policy that does not know it can only
offer several candidates, and position picks exactly one of them. The rules, in order:

1. Text up to the last ``</think>`` is ignored. With an unclosed ``<think>`` the completion was truncated: no answer.
2. Only the last 10,000 characters are read.
3. The last marker of the requested format is the answer: a box, an answer tag, or a ``####`` line.
4. Otherwise the last of all markers is the answer: a box, a tag, a ``####`` line or a phrase like "the answer is".
5. Boxes with nothing but separators or names between them are one answer, a list: ``x=\boxed{1}, y=\boxed{2}``.
6. Without a marker the whole text is the answer if it is one value, otherwise the last value in the text.

>>> find("3 + 4 = 7\n#### 7").text, find(r"so \boxed{\frac{1}{2}}").text, find("The answer is 5 cm.").text
('7', '\\frac{1}{2}', '5 cm')
>>> find("<answer>8</answer>\n#### 7", "gsm8k").text, find("<answer>8</answer>\n#### 7", "xml").text
('7', '8')
>>> find(r"x=\boxed{1} and y=\boxed{2}").text, find("I do not know what to say.").text
('1, 2', '')
"""

import ast
import re
from contextlib import suppress
from typing import NamedTuple

from grpo_math.grading.equal.text import repaired
from grpo_math.grading.formats import FORMATS

TAIL = 10_000  # characters that are read
NEAR = 1_000  # characters at the end or after a phrase that are searched for a value
MARKERS = (
    r"answer is(?! (?:in)?correct| right| wrong)",
    "answers are",
    "answer:",
    "answer =",
    "答案",
    "故选",
    "正确的[是为]",
)
# Labels of a line: the "A" of question and answer, "answer" in other languages, and a choice after 选.
LABELS = (
    r"(?:^|(?<=\n))[ \t>#*]*(?:A|Ans|Ответ|答|答え|回答|정답|답|Réponse|Respuesta|Resposta|Risposta|Antwort"
    r"|Odpowiedź|Cevap|Jawaban|उत्तर|الجواب)\**\s*[:：]\**|选[项择]?(?=\s*[:：是为]?\s*[(（]?[A-J](?![A-Za-z]))"
)

_TOKEN = re.compile(
    r"\\f?box(?:ed)?\s*(?P<open>\{)|\\f?box(?:ed)?(?![A-Za-z])\s*(?P<bare>(?:(?!\\(?:f?box|[])]|end))[^\n$])+)|\\.|[{}]",
    re.DOTALL,
)
# Text between the parts of one answer: separators, "and", "or", names such as "x =" and "(a)", a unit.
_BETWEEN = re.compile(
    r"(?:\$?\s?[A-Za-z]{1,12}(?=,|\s(?:and|or)\b))?"
    r"(?:[\s$,;.&{}]|\\(?:q?quad|text|mbox|[][()\\,; ])|\band\b|\bor\b(?: [a-z]{1,9})?"
    r"|\\?\b[A-Za-z]\w{0,3}\s*=|\([a-z0-9]{1,3}\))*"
)
_LIST = re.compile(r"""\[\s*(["']).*\1\s*\]""", re.DOTALL)
_EMPTY = re.compile(r"\\f?box(?:ed)?\s*\{\s*\}|####\s*\Z")
_TAG = re.compile(r"<answer>((?:(?!<answer>|</answer>).)*)(?:</answer>)?", re.DOTALL)
_HASHES = re.compile(r"####\s*([^\n]+)")
_PHRASE = re.compile(rf"(?:(?i:{'|'.join(MARKERS)})|{LABELS})[\s:：=是为应选】\]*]*(?:一?共|共计|需要?|有)*\s*")
# Calculator marks, as in GSM8K's "= <<3+4=7>>7", chat tokens, and the marks of bold text.
_REMOVED = re.compile(r"<<[^<>\n]{1,100}>>|<\|[A-Za-z_]{1,40}\|>|\*\*(?![\w(])|\*\*(?<![\w)]\*\*)")
_STOP = re.compile(r"[.!?](?=\s|$)|[。！？【\n]|</")
_VALUED = re.compile(r"[\dπ$]|\\(?!end|begin|\W)|\b[A-J]\b(?!['’ ][a-z])")

# A formula, or a word. A dollar sign opens and closes a formula as in Markdown: "$5 and $6" has none.
_FORMULA = r"\$\$[^$]{1,400}\$\$|\$(?!\s)[^$\n]{1,400}(?<!\s)\$(?!\d)|\\\(.{1,400}?\\\)|\\\[.{1,400}?\\\]"
_TUPLE = r"[(\[](?:[^][(){}\s,]{1,20},\s?){1,4}[^][(){}\s,]{1,20}[)\]]"
_ITEM = re.compile(rf"(?P<formula>{_FORMULA})|{_TUPLE}|(?:\\[a-z]+\{{[^{{}}]{{0,60}}\}}|[^\s=$])+|=", re.DOTALL)
_NO_PROSE = re.compile(
    rf"{_FORMULA}|\\(?:text|mathrm|mbox|begin|end|operatorname)\w*\s*\{{[^{{}}]{{0,60}}\}}|\b(?:and|or)\b", re.DOTALL
)
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}(?![A-Za-z(])|(?<!\S)[A-Za-z]{2}(?![^\s.,])")
_CHOICE = re.compile(r"\(?[B-HJ]\)?[.,:]?|\(?A[).:]{1,2}")
_UNIT = re.compile(r"(?: [^\s,;:.!?()=$\\\d]+){0,2}(?: per [A-Za-z]+)?")


class Found(NamedTuple):
    """An answer, and the rule that found it."""

    text: str
    how: str


class _Mark(NamedTuple):
    start: int
    end: int
    text: str
    how: str


# The marker of each format, by the tag that ends its answer.
_FORMAT_MARKERS = {
    name: {"####": "####", "\\boxed": "box", "</answer>": "tag"}[form.tags[-1]] for name, form in FORMATS.items()
}


def find(completion: str, answer_format: str | None = None) -> Found:
    """Return the answer of a completion. The text is empty without an answer."""
    before, _, text = completion.rpartition("</think>")
    text = text if before else text.partition("<think>")[0]
    text = _REMOVED.sub("", text[-TAIL:])
    marks = [*_boxes(text), *_hashes(text), *_tags(text)]
    marker = _FORMAT_MARKERS.get(answer_format or "")
    requested = [mark for mark in marks if mark.how == marker]
    if not requested:
        # A phrase next to other markers counts only after them, and only with a number, a formula or a choice. "The
        # answer is less than 10" only remarks on the answer before.
        phrases = _phrases(text, start=max((mark.end for mark in marks), default=0))
        marks += [phrase for phrase in phrases if not marks or not _is_remark(phrase, text)]
    if not marks:
        return Found(_value(text[-NEAR:]), "value")
    last = max(requested or marks, key=lambda mark: mark.start)
    return Found(_opened(last.text), last.how)


def gold_answer(gold: str) -> str:
    r"""Return the answer that a gold solution marks, the whole text if it marks none, or ``""`` if a marker is empty.

    >>> gold_answer("48 + 24 = 72\n#### 72"), gold_answer(r"so $\boxed{3}$"), gold_answer(" x=5 ")
    ('72', '3', 'x=5')
    >>> gold_answer("72"), gold_answer(r"\boxed{2} and \boxed{3}"), gold_answer("   ")
    ('72', '3', '')
    """
    gold = repaired(without_list(gold))
    # The published answers of MATH are in the last box.
    marks = _boxes(gold, near=0) or _hashes(gold) or _tags(gold)
    return _opened(marks[-1].text) if marks else "" if _EMPTY.search(gold) else gold.strip()


def without_list(gold: str) -> str:
    """Return the answers of a list that is written as text, as in Skywork-OR1. A completion has to give all of them.

    >>> without_list('["7"]'), without_list("['3', '5']"), without_list("[3, 5]")
    ('7', '3, 5', '[3, 5]')
    """
    if _LIST.fullmatch(gold.strip()):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            answers = ast.literal_eval(gold.strip())
            return ", ".join(gold_answer(str(one)) for one in answers)
    return gold


def _boxes(text: str, near: int = 60) -> list[_Mark]:
    """Return the boxes in order. Boxes with only separators or names between them are one, a list of their contents."""
    if "box" not in text:  # most of GSM8K; the search for braces takes longer than everything else
        return []
    opened: list[tuple[int, int, bool]] = []
    boxes: list[tuple[int, int, str]] = []
    for token in _TOKEN.finditer(text):
        if token["bare"]:
            boxes.append((*token.span(), token["bare"]))
        elif token["open"] or token.group() == "{":
            opened.append((*token.span(), bool(token["open"])))
        elif token.group() == "}" and opened:
            start, inside, boxed = opened.pop()
            boxes += [(start, token.end(), text[inside : token.start()])] if boxed else []
    # The last box that is never closed was truncated, or has a stray brace: its content ends with the line.
    for start, inside in [(start, inside) for start, inside, boxed in opened if boxed][-1:]:
        line = text[inside:].partition("\n")[0]
        boxes.append((start, inside + len(line), line.rstrip(" $.")))
    return _joined([_Mark(start, end, content, "box") for start, end, content in sorted(boxes)], text, near)


def _hashes(text: str) -> list[_Mark]:
    """Return the lines after ``####``. A heading without a value is ignored, unless it ends the text."""
    lines = [
        _Mark(line.start(), line.end(), line[1], "####")
        for line in _HASHES.finditer(text)
        if _VALUED.search(line[1]) or not text[line.end() :].strip()
    ]
    return _joined(lines, text)


def _tags(text: str) -> list[_Mark]:
    """Return the contents of the answer tags. A tag that is never closed was truncated: it ends with the text."""
    return _joined([_Mark(tag.start(), tag.end(), tag[1], "tag") for tag in _TAG.finditer(text)], text)


def _joined(marks: list[_Mark], text: str, near: int = 60) -> list[_Mark]:
    """Return the marks that are not empty and not inside another mark. Parts of one answer are joined to a list."""
    groups: list[_Mark] = []
    for mark in marks:
        content = mark.text.strip()
        if not content or (groups and mark.start < groups[-1].end):
            continue
        if groups and mark.start - groups[-1].end < near and _BETWEEN.fullmatch(text, groups[-1].end, mark.start):
            before = groups.pop()
            same = content in before.text.split(", ")
            groups.append(before._replace(end=mark.end, text=before.text if same else f"{before.text}, {content}"))
        else:
            groups.append(_Mark(mark.start, mark.end, content, mark.how))
    return groups


def _phrases(text: str, start: int = 0) -> list[_Mark]:
    """Return the value that follows the last phrase such as "the answer is"."""
    for phrase in reversed(list(_PHRASE.finditer(text, start))):
        if value := _value(text[phrase.end() : phrase.end() + NEAR], last=False):
            return [_Mark(*phrase.span(), value, "phrase")]
    return []


def _is_remark(phrase: _Mark, text: str) -> bool:
    """Return True for "answer is" with words before the first value, and for a phrase without a value."""
    valued = _VALUED.search(phrase.text)
    words = text[: phrase.end].rstrip().endswith(" is") and _PROSE.search(
        phrase.text, 0, valued.start() if valued else 0
    )
    return valued is None or bool(words)


def _opened(text: str) -> str:
    """Return the content of the last box or phrase inside an answer, or the answer itself."""
    if text.isdigit():  # most answers to word problems; the search below takes longer than everything else
        return text
    for _ in range(3):
        inner = _boxes(text) or _phrases(text)
        if not inner:
            break
        text = inner[-1].text
    return text


def _value(text: str, last: bool = True) -> str:
    """Return a text that is one value, or the last value of a text, or the first one of its first sentence."""
    if not last:
        first = _ITEM.search(text)
        stop = _STOP.search(text, first.end() if first and first["formula"] else 0)
        text = text[: stop.start()] if first and stop else text
    # The last line that has a value. A displayed formula may span several lines.
    text = re.sub(_FORMULA, lambda formula: formula.group().replace("\n", " "), text.strip(), flags=re.DOTALL)
    lines = [line for line in text.split("\n") if _VALUED.search(line)] or [text]
    text = lines[-1].strip(" *").lstrip("}").rstrip(".")
    text = text.removesuffix("}" * (text.count("}") - text.count("{")))  # of the braces around the phrase
    if not _PROSE.search(_NO_PROSE.sub("", text)):
        return text
    items = list(_ITEM.finditer(text))
    values = [
        item for item in items if re.search(r"[\dπ]|\$.*\\", item.group()) or _CHOICE.fullmatch(item.group().strip("$"))
    ] or [item for item in items if item["formula"]]
    if len(items) <= 5 and (not values or ("=" not in text and values[0] is items[0] and (last or len(values) == 1))):
        return text if not (values and _CHOICE.fullmatch(values[0].group())) else values[0].group().rstrip(".,:")
    if not values:
        return ""
    # The result of a calculation follows its equal sign: "6 * 7 = 42 eggs in 3 days".
    equal = max((item.start() for item in items if item.group() == "="), default=-1)
    later = [item for item in values if item.start() > equal]
    chosen = later[0] if later and (equal >= 0 or not last) else values[-1 if last else 0]
    value = chosen.group().rstrip(" .,;:!?*")
    if _CHOICE.fullmatch(value):
        return value
    # A few words before the first value may change it, as in "minus 5", and words after a value may be its unit.
    start = chosen.start() if last or chosen not in items[:4] or equal >= 0 or chosen["formula"] else 0
    unit = _UNIT.match(text, chosen.end()) if value == chosen.group() else None
    return text[start : unit.end() if unit else chosen.start() + len(value)].strip()
