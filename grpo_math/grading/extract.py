r"""A completion -> the text of its answer: where the answer stands, and nothing about what it means.

A marker that the asked format names comes first; then, in any format: the last ``<answer>`` tag, the last box or
``####`` line, a phrase such as "the answer is", and at last a bare value (sentence.py). What stands before ``</think>``
is never an answer, an answer that the text around it denies, offers beside another or takes back is none (commit.py),
and a box that is a part of more is read with it (alone.py). Every search runs from the end and in linear time, since
completions can be hostile.

>>> extract("3 + 4 = 7\n#### 7").text, extract(r"so \boxed{\frac{1}{2}}").text, extract("The answer is $5.").text
('7', '\\frac{1}{2}', '5')

Does not compare, and does not clean a value beyond the punctuation around it.
"""

import re
from collections.abc import Callable
from itertools import islice
from math import inf
from typing import NamedTuple

from grpo_math.grading.alone import part_of_more
from grpo_math.grading.beside import among_formulas
from grpo_math.grading.commit import (
    AFTERWARDS,
    BESIDE,
    CUE,
    DANGER,
    alternative,
    denied,
    just_said,
    leads_on,
    one_of_several,
    taken_back,
)  # fmt: skip
from grpo_math.grading.predicate import choice, predicate
from grpo_math.grading.sentence import ANSWER_PHRASE, bare, conclusion, is_short, phrase
from grpo_math.grading.spelled import digits
from grpo_math.grading.text import strip_wrappers

TAIL = 10_000  # characters from the end in which phrases and bare values are looked for
TRIES = 12  # the last boxes that are looked into
BRACES = 2_000  # of a box; one with more is none that could be read
BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])\s*")
FINAL = re.compile(
    r"(?:[.!\n}$]|\\\])\s{0,9}(?:(?:so|thus|therefore|hence),?\s{1,9})?(?:(?:the|my|our)\s{1,9})?"
    r"final answer\s{0,9}(?:is\b|[:：=])",
    re.IGNORECASE,
)
COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
ENDED = re.compile(r"[.?](?=\s)|\n")  # a sentence
WORDS = re.compile(r"(?<!\\)\b[A-Za-z]{2,}\s+[A-Za-z]")
BOLD = re.compile(r"(?<![\w)\]}*])\*\*(?=\S)([^*\n]{1,300}?)(?<=\S)\*\*(?![\w(*])")
SPACES: dict[int, str | None] = {
    **dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2007\u2009\u202f\u3000"), " "),
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad"), None),  # that nobody sees
}
CALCULATED = re.compile(r"(?<=[= $])<<[-+*/().\d% ]{1,80}=[-\d.]{1,20}>>(?=[-\d.$])")  # GSM8K's "= <<3+4=7>>7"
EMPTY_TAG = re.compile(r"<answer>\s*</answer>")
BRACE = re.compile(r"[{}]|\\.", re.DOTALL)
EMPTY_BOX = re.compile(r"\\f?box(?:ed)?\s*\{\s*\}")
HEADING = re.compile(
    r"(?:step|part|solution|explanation|conclusion|final answer|answer|summary)\b[^\d$\\]*\d{0,2}[.:]?\s*$", re.I
)
MORE = re.compile(r"[\d$\\{}=<>|^_]|\b[A-J]{1,5}\b(?! [a-z])")
SHUT = re.compile(r"\$|\\[])]|\\end\s*\{[a-z]+\*?\}")  # the end of the formula in which a box stands
SHUTS = re.compile(rf"(?:[\s.,*]|{SHUT.pattern})*")
OPEN_BOX = re.compile(rf"{BOX.pattern}(?![\s{{])")
VALUE = re.compile(r"[\s$*({\[-]*(?:[−+]?[.\d]|\\[A-Za-z{])|[\s*(]*[A-J]\)?\Z")


class Extraction(NamedTuple):
    """``text`` is None where there is no answer; ``how`` names what was found; ``boxes`` are all boxes of the end."""

    text: str | None
    how: str
    boxes: tuple[str, ...] = ()


class Found(NamedTuple):
    """An answer and where it stands; ``parts`` are the texts of its boxes, tags, or lines, where it has several."""

    text: str
    how: str
    start: int
    end: int
    parts: tuple[str, ...] = ()


def extract(completion: str, answer_format: str | None = None, last_box: bool = True) -> Extraction:
    r"""The answer of a completion. Without ``last_box``, different boxes anywhere in it are several answers.

    >>> extract(r"<think>\boxed{3}</think> The answer is 4.")
    Extraction(text='4', how='phrase', boxes=())
    >>> extract("<answer>8</answer>\n#### 7", "gsm8k").text, extract("<answer>8</answer>\n#### 7", "xml").text
    ('7', '8')
    >>> extract("I cannot say."), extract(r"\boxed{6}. Wait, that is wrong.")
    (Extraction(text=None, how='nothing', boxes=()), Extraction(text=None, how='taken back', boxes=()))
    """
    visible = _after_thinking(completion)
    visible = visible if visible.isascii() else visible.translate(SPACES)
    if "<!--" in visible:
        visible = COMMENT.sub(" ", visible)
    named = FINDERS.get(answer_format or "")
    found = (named is not None and named(visible)) or _tagged(visible) or _concluded(visible) or _box_or_hashes(visible)
    if found and not last_box and len({_box_content(visible, m.end())[0] for m in _last_boxes(visible)} - {""}) > 1:
        return Extraction(None, "several boxes")
    if found:
        return _standing(visible, found)
    tail = BOLD.sub(r"\1", visible[-TAIL:])
    tail = CALCULATED.sub("", tail) if "<<" in tail else tail
    without = EMPTY_TAG.sub(" ", EMPTY_BOX.sub(" ", tail))
    said = phrase(without) or ((choice(tail) or bare(tail) or predicate(tail)) if without == tail else None)
    if said is None:
        return Extraction(None, "nothing" if without == tail else "empty box")
    if said.how.startswith("phrase") and among_formulas("", without[said.end :].partition("[asy]")[0]):
        return Extraction(None, "formulas behind it")
    return _standing(without, Found(*said))


def extract_gold(gold: str) -> Extraction:
    r"""The gold answer: what its last marker holds, or the whole text where it has none.

    >>> extract_gold("48 + 24 = 72\n#### 72").text, extract_gold(r"so $\boxed{3}$").text, extract_gold(" x=5 ").text
    ('72', '3', 'x=5')
    """
    found = _boxed(gold) or _hashes(gold) or _tagged(gold)
    if found is None and BOX.search(gold[-TAIL:]):
        return Extraction(None, "empty box")
    if found is None:
        return Extraction(strip_wrappers(gold) or None, "whole text")
    return Extraction(found.text, found.how, found.parts)


def _standing(text: str, found: Found) -> Extraction:
    """The answer that the text stands by in the end; both where a later sentence gives one again."""
    before, after = text[max(0, found.start - AFTERWARDS) : found.start], text[found.end :]
    if len(found.text) < 9 and found.text.isascii() and re.search(r"[\w{]", found.text) is None:
        return Extraction(None, "punctuation alone")
    if found.how.startswith("phrase") and just_said(before, found.text):
        return Extraction(None, "one of several answers")
    if (
        not after
        and found.how != "box"
        and (before.endswith("\n") or CUE.search(before, max(0, len(before) - BESIDE)) is None)
    ):  # most answers
        return Extraction(found.text, found.how, found.parts)
    later = phrase(BOLD.sub(r"\1", after[:TAIL])) if after.strip() else None
    if later is None or later.how != "phrase" or not _is_value(later.text) or after[later.end :][:1] == "?":
        ended = _ended(text, found)
        later = None if ended == inf else conclusion(after[:TAIL].partition("[asy]")[0])
        later = None if later is None or later.start < ended else later
    if later is not None:
        return Extraction(later.text, "said twice", (found.text, later.text))
    if found.how == "box" and OPEN_BOX.match(text, found.start) and MORE.search(SHUTS.sub("", after, 1)):
        return Extraction(None, "values behind a box without braces")
    if taken_back(after, found.text):
        return Extraction(None, "taken back")
    if denied(before):
        return Extraction(None, "denied")
    if one_of_several(before) or alternative(after, found.text):
        return Extraction(None, "one of several answers")
    more = part_of_more(before, found.text, after) if found.how == "box" else None
    if more is not None:
        return Extraction(more.strip(), "part of more")
    return Extraction(found.text, found.how, found.parts)


def _ended(text: str, found: Found) -> float:
    """How far behind an answer its sentence ends; a phrase takes its stop along."""
    if found.how.startswith("phrase") and text[found.end - 1] in ".!?":
        return 0
    ended = ENDED.search(text, found.end)
    return inf if ended is None else ended.start() - found.end


def _concluded(text: str) -> Found | None:
    """The value that a "final answer" sentence gives after the last box, which was then an interim result."""
    last = text.rfind("box")
    sentences = list(FINAL.finditer(text, max(last, len(text) - TAIL))) if last >= 0 else []
    said = phrase(BOLD.sub(r"\1", text[sentences[-1].start() :])) if sentences else None
    if said is None or not re.search(r"\d|\\", said.text):
        return None
    return Found(said.text, said.how, sentences[-1].start() + said.start, sentences[-1].start() + said.end)


def _is_value(text: str) -> bool:
    if "$" in text or len(text) > 200:
        return False
    return is_short(text) or VALUE.match(text) is not None or re.fullmatch(r"-?[\d.,/]+", digits(text)) is not None


def _after_thinking(completion: str) -> str:
    _, end, visible = completion.rpartition("</think>")
    return visible if end else completion.partition("<think>")[0]


def _tagged(text: str) -> Found | None:
    if "</answer>" not in text:
        return None
    parts: list[str] = []
    first = last = end = len(text)
    for _ in range(8):
        end = text.rfind("</answer>", 0, end)
        start = text.rfind("<answer>", 0, end) if end >= 0 else -1
        if start < 0:
            break
        inner = text[start + len("<answer>") : end].strip()
        if inner and parts and not _joined(text[end + len("</answer>") : first]):
            break
        if inner:
            inside = _box_or_hashes(inner) or phrase(inner[-TAIL:])
            parts.insert(0, strip_wrappers(inner) if inside is None else _within(inner, Found(*inside)))
            first, last = start, last if len(parts) > 1 else end + len("</answer>")
        end = start
    return _several(parts, "answer tag", first, last) if parts else None


def _within(text: str, found: Found) -> str:
    """The answer that a box or a phrase gives within a tag or a line; all of the text where more stands behind it."""
    before, behind = text[: found.start], text[found.end :]
    refused = DANGER.search(before[-BESIDE:]) is not None
    texts = re.search(r"\\(?:text|under|[mf]box)", before) is not None
    before = "" if WORDS.search(before) and not refused and not texts else before  # a sentence leads up to it
    more = refused or re.search(r"\d|\\[a-z]", before + behind) is not None or DANGER.search(behind) is not None
    said = Extraction(None, "more behind it") if more else _standing(text, found)
    standing = None if said.how == "said twice" and len({*said.boxes}) > 1 else said.text
    if standing == found.text and len(set(found.parts)) > 1:  # boxes side by side are all the answer
        standing = ", ".join(found.parts)
    return strip_wrappers(text) if standing is None else standing


def _several(parts: list[str], how: str, start: int, end: int) -> Found:
    return Found(parts[-1], how, start, end, tuple(parts) if len(parts) > 1 or how == "box" else ())


def _hashes(text: str) -> Found | None:
    parts: list[str] = []
    first = last = end = len(text)
    for _ in range(8):
        end = text.rfind("####", 0, end)
        if end < 0:
            break
        stop = text.find("\n", end)
        stop = len(text) if stop < 0 else stop
        line = text[end + 4 : min(stop, first) if parts else stop].lstrip("#").strip()
        if not line and not parts:  # "####" above its answer
            stop = len(text) - len(text[stop:].lstrip())
            stop, below = (text.find("\n", stop), stop)
            stop = len(text) if stop < 0 else stop
            line = text[below:stop].strip()
        found = ANSWER_PHRASE.match(line) if "n" in line else None
        line = strip_wrappers(line if found is None else line[found.end() :])
        box = _boxed(line) if "box" in line else None
        line = line if box is None else _within(line, box)
        if line and not (len(line) < 80 and HEADING.fullmatch(line)):
            if parts and (VALUE.match(line) is None or text[stop:first].strip()):
                break
            parts.insert(0, re.sub(r"\s*\b(?:or|and)\Z", "", line) if parts else line)
            first, last = end, last if len(parts) > 1 else stop
        if parts and text.find("####", max(0, first - 200), first) < 0:
            break
    return _several(parts, "####", first, last) if parts else None


def _box_or_hashes(text: str) -> Found | None:
    boxed, hashes = _boxed(text), _hashes(text)
    if boxed is None or hashes is None:
        return boxed or hashes
    heading = re.match(r"[-−+$\\(\[.\d]", hashes.text) is None  # "#### Step 3" is a heading
    return boxed if heading or text.rfind("box") > text.rfind("####") else hashes


def _boxed(text: str) -> Found | None:
    """The last box that is not empty, and those that stand beside it as parts of one answer."""
    if "box" not in text:
        return None
    boxes: list[str] = []
    first = last = len(text)
    apart = False
    for match in _last_boxes(text):
        content, end = _box_content(text, match.end())
        if not content:
            continue
        if boxes and end > first:  # it holds the one before, and is the answer where it holds more
            if re.search(r"\w", (text[match.end() : first] + text[last:end]).replace("\\displaystyle", "")):
                boxes = [content]
            first, last = match.start(), max(end, last)
            continue
        apart = apart or (bool(boxes) and not _joined(text[end:first]))
        if apart:  # only one that holds it counts
            continue
        boxes.insert(0, content)
        first, last = match.start(), last if len(boxes) > 1 else end
    if not boxes:
        return None
    if len(boxes[-1]) < 1000 and "nswer" in boxes[-1]:  # "the answer is 7" inside the box
        said = phrase(re.sub(r"\\text\w*\s*\{([^{}]*)\}", r"\1", boxes[-1]))
        boxes[-1] = said.text if said is not None else boxes[-1]
    return _several(boxes, "box", first, last)


FINDERS: dict[str, Callable[[str], Found | None]] = {
    "gsm8k": _hashes, "direct": _hashes, "boxed": _boxed, "r1_zero": _tagged, "xml": _tagged,
    "python": _hashes,
}  # fmt: skip


def _last_boxes(text: str) -> list[re.Match[str]]:
    """Where the last boxes open, the last one first."""
    found: list[re.Match[str]] = []
    end = len(text)
    for _ in range(10 * TRIES):
        end = text.rfind("\\", 0, max(0, text.rfind("box", 0, end)))
        match = BOX.match(text, end) if end >= 0 else None
        if match is not None:
            found.append(match)
        if end < 0 or len(found) == TRIES:
            break
    return found


def _joined(between: str) -> bool:
    """Are two answers parts of one? Only commas, "and", "or", and a few words such as units stand between them."""
    if len(between) > 60 or leads_on(between):
        return False
    plain = re.sub(r"\\(?:q?quad|text|mathrm|[,;: ()\[\]])|[{}]", " ", between)
    if re.search(r"\b(?:[A-J]|not?|nor|never|neither)\b", plain) is not None:
        return False
    listed = re.search(r",|;|\band\b|\bor\b|&|/", plain) is not None or not plain.strip(" $")
    return listed and re.fullmatch(r"[A-Za-z\s$,;&/]*", plain) is not None and len(plain.split()) <= 6


def _with_odd_brace(text: str, start: int, closing: re.Match[str]) -> tuple[str, int]:
    r"""What a box holds and where it ends; up to a brace further on in its line that nothing has opened, if words or
    values stand before that one.

    >>> text = r"\boxed{(1, 2)} and 3}"
    >>> _with_odd_brace(text, 6, re.compile("}").search(text))
    ('(1, 2)} and 3', 21)
    """
    end, stop = closing.end(), text.find("\n", closing.end(), closing.end() + AFTERWARDS)
    stop = min(end + AFTERWARDS, len(text)) if stop < 0 else stop
    if text.find("}", end, stop) >= 0:
        before = [match.group() for match in BRACE.finditer(text, max(0, start - AFTERWARDS), start)]
        depth = max(0, before.count("{") - before.count("}"))
        for match in BRACE.finditer(text, end, stop):
            depth += (match.group() == "{") - (match.group() == "}")
            if depth < 0:
                if re.search(r"\w", text[end : match.start()]):
                    return strip_wrappers(text[start + 1 : match.start()]), match.end()
                break
    return strip_wrappers(text[start + 1 : closing.start()]), end


def _box_content(text: str, start: int) -> tuple[str, int]:
    r"""What a box holds and where it ends; a box that never closes holds the rest of its line, or of the
    text where a value stands below."""
    if start >= len(text):
        return "", start
    if text[start] != "{":
        line = text[start : start + TAIL].partition("\n")[0]
        shut = SHUT.search(line)
        rest = "" if shut is None else line[shut.end() :]
        line = line if shut is None else line[: shut.start()]
        if MORE.search(rest) or DANGER.search(rest) or not line.strip():  # more than one value behind a bare \boxed
            line += rest
        for stop in islice(re.finditer(r"(?<!e\.g)(?<!i\.e)\.(?=\s|\Z)(?!\s*[a-z\d=\\(])", line), TRIES):
            if line.count("{", 0, stop.start()) == line.count("}", 0, stop.start()):
                line = line if MORE.search(line, stop.end()) else line[: stop.start()]
                break
        line = line.rstrip(" ?")  # the question stays behind the box
        return strip_wrappers(line), start + len(line)
    depth = 0
    for match in islice(BRACE.finditer(text, start), BRACES):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
            if depth == 0:
                return _with_odd_brace(text, start, match)
    line, _, rest = text[start + 1 : start + TAIL].partition("\n")
    line = line + rest if re.search(r"\d|\\(?!end)[a-z]", rest) else line  # values that the box may hold too
    stripped = line.rstrip("$ .")
    if "\\{" not in line:
        stripped = stripped.removesuffix("\\}")  # the closing brace behind a stray backslash
    return strip_wrappers(stripped), start + 1 + len(line)
