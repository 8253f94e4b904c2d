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
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from grpo_math.grading.equal.compare import GOLD_CHOICE, value
from grpo_math.grading.equal.text import repaired
from grpo_math.grading.equal.units import CHANGES, read_unit
from grpo_math.grading.equal.words import MONTHS
from grpo_math.grading.formats import FORMATS
from grpo_math.grading.lexicon import BRACKETED, CHOICE, CIRCLED, CURRENCIES
from grpo_math.grading.vocabulary import FOREIGN, LATIN, START, either, in_english, whole_words, words

TAIL = 10_000  # characters that are read
NEAR = 1_000  # characters at the end or after a phrase that are searched for a value
_TOKEN = re.compile(
    r"\\f?box(?:ed)?\s*(?P<open>\{)|\\f?box(?:ed)?(?![A-Za-z])\s*(?P<bare>(?:(?!\\(?:f?box|[])]|end))[^\n$])+)|\\.|[{}]",
    re.DOTALL,
)
# Text between the parts of one answer: a unit, then separators, "and", "or", names such as "x =" and "(a)".
_UNIT_BEFORE = r"(?:\$?\s?[A-Za-z]{1,12}(?=,|\s(?:and|or)\b))?"
_SEPARATOR = r"[\s$,;.&{}、]|\\(?:q?quad|text|mbox|[][()\\,; ])"
_NAME_BEFORE = r"\\?\b[A-Za-z]\w{0,3}\s*=|\([a-z0-9]{1,3}\)"
_OR_BETWEEN = rf"{either('or')}(?: (?!{either('and', 'or')})[a-z]{{1,9}}(?![A-Za-z]))?"
_BETWEEN = re.compile(rf"{_UNIT_BEFORE}(?:{_SEPARATOR}|{either('and')}|{_OR_BETWEEN}|{_NAME_BEFORE})*")
_LIST = re.compile(r"""\[\s*(["']).*\1\s*\]|\{\s*(["'])\w+\2\s*:.*\}""", re.DOTALL)
_EMPTY = re.compile(r"\\f?box(?:ed)?\s*\{\s*\}|####\s*\Z")
_TAG = re.compile(r"<answer>((?:(?!<answer>|</answer>).)*)(?:</answer>)?", re.DOTALL)
_HASHES = re.compile(r"####\s*([^\n]+)")
# Calculator marks, as in GSM8K's "= <<3+4=7>>7", chat tokens, and the marks of bold text.
_REMOVED = re.compile(
    r"<<[^<>\n]{1,100}>>|<\|[A-Za-z_]{1,40}\|>|</?(?:s|b|i|u|em|strong|p|br|span|eos|end_of_turn)/?>|```json\b|`"
    r"|~~[^~\n]{1,60}~~|- (?<![^\n]..)(?=\*\*)|> (?<![^\n]..)"
    rf"|\*\*(?![\w(])|\*\*(?<![\w)]\*\*)|\*\*(?={FOREIGN})|\*\*(?<={FOREIGN}\*\*)"
)

# Signs of other scripts, by one sign each: the end of a sentence, a question, a space, nothing, a point and a comma.
_SIGNS = str.maketrans(
    {
        **dict.fromkeys("。！｡۔।॥።។៕။։᙮᠃᠉", "。"),
        **dict.fromkeys("？؟፧⁇\u037e", "？"),
        **dict.fromkeys("\u00a0\u2007\u2009\u202f\u3000", " "),
        **dict.fromkeys("\u200b\u200e\u200f\u061c\u2060\ufeff", ""),
        **dict.fromkeys(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))), ""),
        **{chr(code): chr(code - 0xFEE0) for code in range(0xFF02, 0xFF5F) if chr(code) not in "．？"},
        "٫": ".", "٬": ",",
    }
)  # fmt: skip
_UNIT_IN_BRACKETS = re.compile(rf"(?<=\d)\(({FOREIGN}{{1,4}})\)")  # 9×4=36（个）
_DIGIT = re.compile(r"(?![0-9])\d")

_VALUED = re.compile(rf"[\dπ$¼-¾⅐-⅞{CIRCLED}]|\\(?!end|begin|\W)|(?<![A-Za-z]){CHOICE}(?![A-Za-z])(?!['’ ][a-z])")

_SHORT = re.compile(rf" (?!(?:{'|'.join(CHANGES)})\b)[a-z]{{2,3}}\b")
# A formula, or a word. A dollar sign opens and closes a formula as in Markdown: "$5 and $6" has none.
# A formula ends before the next one begins: a search for an end that is missing would go over the text again and again.
_FORMULA = (
    r"\$\$[^$]{1,400}\$\$|\$(?!\s)[^$\n]{1,400}(?<!\s)\$(?!\d)"
    r"|\\\((?:(?!\\\().){1,400}?\\\)|\\\[(?:\\\\|(?!\\[\\[]).){1,400}?\\\]"
)
_TUPLE = r"[(\[](?:[^][(){}\s,]{1,20},\s?){1,4}[^][(){}\s,]{1,20}[)\]]"
_ITEM = re.compile(
    rf"(?P<formula>{_FORMULA})|{_TUPLE}|\d{{1,3}}(?: \d{{3}})+(?![\d/-])|{FOREIGN}+"
    rf"|[{LATIN}]*[\u00c0-\u024f\u1e00-\u1eff][{LATIN}]*"
    rf"|(?![,;:])(?:\\[a-z]+\{{[^{{}}]{{0,60}}\}}|(?!{FOREIGN})[^\s=$、])+|=",
    re.DOTALL,
)
_NO_PROSE = re.compile(
    rf"{_FORMULA}|\\(?:text|mathrm|mbox|begin|end|operatorname)\w*\s*\{{[^{{}}]{{0,60}}\}}|\b(?:and|or|sin|cos|tan|ln|log|exp|sqrt)\b",
    re.DOTALL,
)
_PROSE = re.compile(
    rf"(?<![\\A-Za-z])[A-Za-z]{{3,}}(?![A-Za-z(])|(?<!\S)[A-Za-z]{{2}}(?![^\s.,])|{FOREIGN}|[\u00c0-\u024f\u1e00-\u1fff]"
    "|[\u0370-\u03ff]{3}"
)
_CHOICE = re.compile(rf"(?![(]?[AI]){BRACKETED}[.,:]?|\(?A[).:,]{{1,2}}|A|[{CIRCLED}]")
# A choice with its mark, and the text of the option: "(B) 3:45 P.M.", "B, 14/09/2031", "the best option is E) 12 A".
_CLAUSE = r"(?!(?:is|are|was|because|since|as|so|or|and|not|but|nor)\b|[,;/&|=<>])"
_CHOICE_WITH_TEXT = re.compile(
    rf"(?:\A|\b(?:is|[Oo]ption|choice|answer):? )\(?({CHOICE})(?:\)|[.:](?=\s))\s*{_CLAUSE}(\S.*)\Z"
    rf"|\b(?:[Oo]ption|[Cc]hoice) \(?({CHOICE})\)?(?:, | is (?:the )?correct(?: one| option| choice| answer)?: )"
    rf"{_CLAUSE}(\S.*)\Z"
    rf"|(?<![\w(])(?<!\bnot )(?<!\bNot )\(?({CHOICE})(?:\)|[.:,](?= ?[\d{CURRENCIES}]))"
    rf"\s*([-{CURRENCIES}\\]?\d[^()]*)\Z",
    re.DOTALL,
)
_MARKED = re.compile(rf"{CHOICE}(?:[).:,]| is )")  # for speed
# The text of an option, or a clause behind "yes" or "no", matters only to a gold answer of that kind.
_KIND = re.compile(rf"(?:\({CHOICE}\)|(?i:yes|no|true|false)(?:[,.;:!]| [–—-])) +(\S.*)", re.DOTALL)
_ROW = re.compile(r"\| .*\| *([^|\s][^|]*?) *\|")  # of a table: its last cell
_QUOTED = re.compile(r"""["“„「『«]((?:[^"“”」』»\\\n]|\\.){1,400})["“”」』»]""")
_AFFIRMED = re.compile(r"(?:\\text\s*\{\s*)?(?i:yes|no|true|false)(?:\}?(?:[,.;:!}]| [–—-]) | \()")
# Several choices are one answer, and so are several values of one name: "A or C", "x = 2 or x = -3".
_MAYBE = "(?:maybe|perhaps|possibly)"
_CHOICES = re.compile(
    rf"{START}(?<![\d(]){BRACKETED}(?:(?:,? (?:(?:and|or)(?: {_MAYBE})?|{_MAYBE}) |[,/] ?){BRACKETED}(?![A-Za-z\d]))+"
)
_IS = r"(?:_\{?\w\}?)? ?= ?[^=,]{1,60}?"
_SOLUTIONS = re.compile(rf"\$?(?P<name>[a-z]){_IS}(?:(?:,? (?:and|or) |, ?)\$?(?P=name){_IS})+\Z")
_POWER = re.compile(r"[A-Za-zμ]{1,3}\^\{?[23]\}?\.?")
_UNIT = re.compile(
    rf" {_POWER.pattern}| [ap]\.m\b|{FOREIGN}*(?: [^\s,;:.!?。？()=$\\\d\u0370-\u03ff]+){{0,2}}(?: per [A-Za-z]+)?"
)

_AROUND = " #*'\"“”„「」『』«»,✅✔✓→⇒🎉👍🎯"  # a value: quotes, bold, a quotation, a cell of a table
LABELS = tuple(words("answer"))
ASCII_LABELS = tuple(filter(str.isascii, LABELS))
# "A: 42" at the start of a line, and a heading.
_LINE_LABEL = (
    r"(?:^|(?<=\n))(?:[ \t>#*]{0,20}(?-i:A|Ans)\*{0,3}\s{0,9}:\*{0,3}"
    r"|[ \t>]{0,9}(?:#|\*\*)[#* \t]{0,20}(?:(?:the )?(?:final )?answer|(?:最終的な)?(?:答え|回答|解答))"
    r"[*: \t]{0,9}(?=\n))"
)
# Text between a label and its value. The look-ahead is for speed.
_BEFORE_VALUE = re.compile(rf"(?:[\s:=】\]*]|[–—-]\s|(?=[^\W\d_]){either('harmless')})*", re.IGNORECASE)
_COPULA = re.compile(r"[:=]|\b(?:is|are)\b", re.IGNORECASE)
# A remark is not an answer.
_REMARK = re.compile(
    r"\b(?:would|might|could|may) (?:say|think|guess|argue|answer)\b|\bhad (?:we|i|you)\b"
    r"|\A\s*+\([^A-Za-z]*+[A-Za-z][^ =]*+[ =].*\)\s*\Z",
    re.IGNORECASE,
)
# A sentence as an answer: two words or more before its first number, and no formula.
_SENTENCE = re.compile(
    r"(?:\\text\w*\s*\{)?\s*((?![a-z])[^\W\d_][^\d=\\{}$\s]*\s[^\d=\\{}$]*\s[" + CURRENCIES + r"]?\d[^=\\{}]*)\}?\.?"
)
# Words directly before a value that change it: a negation, "minus", "the cube of", "3 out of" 5.
_FRACTION = r"\d\S*(?: [a-z]+)?(?: out)? of(?: the| these| those| his| her| their)?"
_NOTS, _CHANGES = (
    tuple(whole_words(filter(kept, words(kind))) for kept in (str, str.isascii)) for kind in ("not", "changes")
)
# In any text, and in one of ASCII characters: fewer words take less time.
_CHANGED, _CHANGED_ASCII = (
    re.compile(
        rf"(?:{START}(?:{no}(?:\s+\\?[^\W\d_]+){{0,2}}|{change}(?:\s+(?:of|the|an?)\b)*|(?:{MONTHS})\.?)|{_FRACTION}"
        r"|(?<=[=A-Za-z] )[-−])\s*\Z",
        re.IGNORECASE,
    )
    for no, change in zip(_NOTS, _CHANGES, strict=True)
)
_SO = re.compile(r"\b(?:so|then|thus|hence|therefore)\b")
# Between two values, one of which is not meant.
_OTHERWISE = re.compile(
    rf"か\Z|(?:{START}|(?=[\u0e00-\U0010ffff])){either('or', 'maybe')}|[/|~…∨]|\.\.\.|\\lor", re.IGNORECASE
)
_NO_NOUN = re.compile(rf"{FOREIGN}|(?:because|since|as|so|and|not|but)\b|{either('or', 'maybe')}")
# Between the last two values, both of which are the answer: "5 or 6", "from 5 to 6", "the numbers are 5 and 6".
_BOTH = re.compile(
    rf"(?P<or>[,;]? (?:[^\W\d_]+ ){{0,3}}(?:or|otherwise|else) )|,? ?(?:and|{either('to')}) ?", re.IGNORECASE
)
_JOINING = re.compile(
    r" (?:[a-z]+ )?(?:(?:out )?of|to|until|through|to the power of) (?:[a-z]+ )?| if [^\d]{1,30}, ?"
    r"| (?!(?:because|since|as|in|for|per|at|by|every|after|when|while|so|hence|thus)\b)[^\W\d_]{2,20} "
    r"|,? (?:(?!because|since)[^\W\d_]+ ){0,3}(?:and|or) "
)
_PART = re.compile(r"\(?([a-d])[).] *(\S.*)")
# "239, which is 3 more than before", "42, not 41", "$x + C$, where $C$ is constant": the value before it counts.
_COMPARED = re.compile(
    r"(?:,? and not|, not| \(not| rather than) [-" + CURRENCIES + r"]?\d\S{0,12}\Z"
    r"|,? where \W{0,4}[A-Za-z]\b\S{0,12} (?:is|are|denotes|represents)\b"
    r"|, (?:which is )?\S{1,9} (?:[a-z]+ )?(?:more|fewer|less|greater|higher|lower) (?:[a-z]+ )?than\b"
)
_NO_LATER = re.compile(r"\bno (?:later|earlier|sooner) than (?=\d)")
# The value behind "is" in a sentence: "8 pens cost 12".
_PREDICATE = re.compile(
    rf"{START}{either('is')}(?:\s{{1,9}}[^\W\d_]{{1,30}})?\s{{0,9}}[{CURRENCIES}]?\Z", re.IGNORECASE
)
_ALTERNATIVE = re.compile(rf"{START}{either('or', 'not')}|\b(?:maybe|perhaps|possibly|if)\b", re.IGNORECASE)
# The rest of the sentence describes the value, unless another clause has another value: "12 dollars to buy 5, so 5".
_PURPOSE = re.compile(
    r"\b(?:to (?!the\b|an?\b)[a-z]+|of [a-z]{3,}ing|after|when|who|for the)\b|\b(?:for|in|every|per) \Z"
    r"|(?:\b(?:pour [^\W\d_]{2,20}[ei]r|para [^\W\d_]{1,20}[aei]r|per [^\W\d_]{2,20}re|чтобы|щоб)|, (?:um|żeby|aby))\b"
    r"(?=[^,;]{0,60}\Z)"
)
_NEW_CLAUSE = re.compile(
    r"[;–—]|:(?!\d)|\b(?:so|then|thus|hence|therefore|which|but|not)\b|, (?:or|it|that|this|giving|leaving|making)\b"
)
# An equation that describes a letter: "x where x - 1" = 36.
_UNSOLVED = re.compile(
    r"\b[a-z]\$? (?:where|such that|so that|for which|with|satisfying|if) [^=]{0,40}(?:[-−+*/] ?\S{1,9}|\d[a-z]) ?\Z"
)
# A sum or an equation at the end of a sentence: "the nth term is 3n + 2".
_TERM = r"(?!\S{0,20}[^\W\d_²³]{2})[^\s=,;:$\\]{1,20}"
_EXPRESSION = re.compile(rf"(?:\b(?:is|as|to|equation|gives):?|:) ((?:{_TERM} ){{1,12}}{_TERM}(?: = 0)?)\Z")
_VARIABLE = re.compile(r"(?<![^\W\d_])[a-z](?![^\W\d_])")
_MORE = re.compile(r"(?:\s*[-−+*/×·]\s*(?:\d[\w.^]*|[a-z](?![a-z])[\w^]*))+")  # more terms: "- 3" behind "-5x"
_NOT = re.compile(rf"{START}{either('not')}", re.IGNORECASE)
_NEGATED = re.compile(rf"\s?(?:(?:is|was) not\b|{either('after')})", re.IGNORECASE)
_AT_END = "$ .,;:!?*"
_OPERATOR = re.compile(r"[-−+*/×÷·:^=x<>]")
_CAUSE = re.compile(r"\b(?:because|since|as)\b")

# The end of a sentence: a sign, the end of a line, the number of the next step, a space in a script that has one only
# there.
_STOP = (
    rf"(?<!\A{CHOICE})(?<![\n*(]{CHOICE})(?<!\bRs)(?<!\d\.\.)\.(?=\s|\Z)"
    r"|(?<=[A-Za-z])!(?=\s|\Z)|。|(?<=[^.]\.\$)(?=\s)|(?<=[^.]\.\\\])"
)
_QUESTION = r"(?P<question>\?(?=[\s*]|\Z)|？)"
_NEXT_LINE = r"</|【|\n(?:[^\S\n]*+[*#]*+\d{1,2}\.(?=\s+\S))?"
_SPACE = "(?<=[\u0e00-\u0eff])\\s+(?=[\u0e00-\u0eff])"
_END = re.compile(rf"(?:{_FORMULA})|(?P<end>{_STOP}|{_QUESTION}|{_NEXT_LINE}|{_SPACE})", re.DOTALL)


class Found(NamedTuple):
    """An answer, and the rule that found it."""

    text: str
    how: str


class _Mark(NamedTuple):
    start: int
    end: int
    text: str
    how: str


# 1.250,50: a comma is decimal and a point separates thousands, in a text with such a number or with a label of a
# language that writes so.
_COMMA = re.compile(
    r"(?<![\d.,({\[])(\d{1,3}(?:\.\d{3})+|\d+),(\d{1,2}|\d{4,12}|(?:(?<=\b0,)|(?<=\d{4},)|(?<=\.\d{3},))\d{3})(?![.,]*\d)"
)
_INDIAN = re.compile(r"(?<![\d.,])\d{1,2}(?:,\d\d)+,\d{3}(?![\d,])")  # 3,00,000
_GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:\.\d{3})+(?![.,]*\d)")
_COMMA_HABIT = re.compile(
    rf"(?<![\d,])\d+,\d\d(?![\d,])|\d\.\d{{3}}[.,]\d|(?<![^\W\d_]){either('answer', decimal=',')}", re.IGNORECASE
)

# The marker of each format, by the tag that ends its answer.
_FORMAT_MARKERS = {
    name: {"####": "####", "\\boxed": "box", "</answer>": "tag"}[form.tags[-1]] for name, form in FORMATS.items()
}


def find(completion: str, answer_format: str | None = None, *, only_marked: bool = False) -> Found:
    """Return the answer of a completion. The text is empty without an answer.

    ``only_marked``: without a marker there is no answer. The search for a value takes longer than everything else.
    """
    before, _, text = completion.rpartition("</think>")
    text = text if before else text.partition("<think>")[0]
    text = _REMOVED.sub("", _in_our_signs(text[-TAIL:]))
    marks = [*_boxes(text), *_hashes(text), *_tags(text)]
    marker = _FORMAT_MARKERS.get(answer_format or "")
    requested = [mark for mark in marks if mark.how == marker]
    if not requested:
        # A phrase next to other markers counts only after them, and only with a number, a formula or a choice. "The
        # answer is less than 10" only remarks on the answer before.
        phrases = _phrases(text, start=max((mark.end for mark in marks), default=0))
        marks += [phrase for phrase in phrases if not marks or not _is_remark(phrase, text)]
    if not marks:
        return Found("" if only_marked else _last_value(without_list(text[-NEAR:])), "value")
    last = max(requested or marks, key=lambda mark: mark.start)
    return Found(_opened(last.text), last.how)


def gold_answer(gold: str) -> str:
    r"""Return the answer that a gold solution marks, the whole text if it marks none, or ``""`` if a marker is empty.

    >>> gold_answer("48 + 24 = 72\n#### 72"), gold_answer(r"so $\boxed{3}$"), gold_answer(" x=5 ")
    ('72', '3', 'x=5')
    >>> gold_answer("72"), gold_answer(r"\boxed{2} and \boxed{3}"), gold_answer("   ")
    ('72', '3', '')
    """
    if gold.isdigit():  # most answers to word problems
        return gold
    gold = repaired(without_list(gold))
    # The published answers of MATH are in the last box.
    marks = _boxes(gold, near=0) or _hashes(gold) or _tags(gold)
    return _opened(marks[-1].text) if marks else "" if _EMPTY.search(gold) else gold.strip()


def with_points(gold: str, answer: str, completion: str) -> str:
    """Return an answer with decimal points if the completion has decimal commas and the gold answer is one number.

    >>> with_points("7", "7,00", "7,00"), with_points("1250", "1.250", "Antwort: 1.250"), with_points("1, 2", "1,2", "")
    ('7.00', '1250', '1,2')
    """
    if _INDIAN.search(answer) and value(gold) is not None:
        answer = _INDIAN.sub(lambda number: number.group().replace(",", ""), answer)
    grouped, comma = _GROUPED.search(answer), _COMMA.search(answer)
    if not (grouped or comma) or value(gold) is None:
        return answer
    if grouped and not comma:
        if not _COMMA_HABIT.search(completion):
            return answer
        answer = _GROUPED.sub(lambda number: number.group().replace(".", ""), answer)
    return _COMMA.sub(lambda number: f"{number[1].replace('.', '')}.{number[2]}", answer)


def read_for(gold: str, answer: str) -> str:
    """Return the value in the text of an option, or behind "Yes, ", if the gold answer is neither a choice nor "yes".

    >>> read_for("B", "(B) it is 12 cm"), read_for("12", "(B) it is 12 cm"), read_for("no", "No, x = 1 is none")
    ('(B) it is 12 cm', '12 cm', 'No, x = 1 is none')
    """
    kind = _KIND.fullmatch(answer)
    if kind is None or GOLD_CHOICE.match(gold) or _AFFIRMED.match(f"{gold.strip('.}')}, "):
        return answer
    return _value(kind[1])


def without_list(gold: str) -> str:
    """Return the answers of a list or an object that is written as text. A completion has to give all of them.

    >>> without_list('["7"]'), without_list("['3', '5']"), without_list("[3, 5]"), without_list('{"x": 3, "y": 5}')
    ('7', '3, 5', '[3, 5]', 'x = 3, y = 5')
    >>> without_list('{"answer": 3, "because": "1 + 2 = 3"}')
    '3'
    """
    if _LIST.fullmatch(gold.strip()):
        with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            answers = ast.literal_eval(gold.strip())
            if isinstance(answers, dict):
                final = next((answers[name] for name in ("answer", "final_answer") if name in answers), None)
                if final is None and not all(isinstance(one, str | int | float) for one in answers.values()):
                    return gold  # the tests of a program
                answers = [f"{name} = {one}" for name, one in answers.items()] if final is None else [final]
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


@lru_cache(maxsize=1024)
def _label(*present: str) -> re.Pattern[str]:
    """Return the pattern of these labels. A search for the labels of all languages at once would take too long."""
    return re.compile(
        rf"(?:(?<![A-Za-z]){whole_words(present)}(?! (?:in)?correct| right| wrong)|{_LINE_LABEL})", re.IGNORECASE
    )


def _phrases(text: str, start: int = 0) -> list[_Mark]:
    """Return the value that follows the last phrase such as "the answer is"."""
    end, lowered = len(text), text[start:].lower()
    if not lowered.strip():  # most texts end with their marker
        return []
    label = _label(*[word for word in (ASCII_LABELS if text.isascii() else LABELS) if word in lowered])
    for match in reversed(list(label.finditer(text, start))):
        between = _BEFORE_VALUE.match(text, match.end(), max(end, match.end()))
        behind = between.end() if between else match.end()
        if value := _value_behind(text[behind : min(end, behind + NEAR)], text[match.start() : behind]):
            return [_Mark(match.start(), behind, value, "phrase")]
        end = match.start()
    return []


def _is_remark(phrase: _Mark, text: str) -> bool:
    """Return True for "answer is" with words before the first value, and for a phrase without a value."""
    valued = _VALUED.search(phrase.text)
    words = _PROSE.search(phrase.text, 0, valued.start() if valued else 0)
    return valued is None or (words is not None and ":" not in text[phrase.start : phrase.end])


def _opened(text: str) -> str:
    """Return the content of the last box or phrase inside an answer, or the one value of a sentence, or the answer."""
    if text.isdigit():  # most answers to word problems; the search below takes longer than everything else
        return text
    text = without_list(text) if len(text) <= NEAR else text
    for _ in range(3):
        inner = _boxes(text) or _phrases(text)
        if not inner:
            break
        text = inner[-1].text
    sentence = _SENTENCE.fullmatch(text.strip())
    return _value(sentence[1] or text) if sentence and len(_Sentence(sentence[1] or text).values) == 1 else text


def _in_our_signs(text: str) -> str:
    """Return the text with the digits, full stops and spaces of other scripts by one sign each."""
    if text.isascii():
        return text
    text = _DIGIT.sub(
        lambda digit: str(unicodedata.decimal(digit.group())), unicodedata.normalize("NFC", text).translate(_SIGNS)
    )
    return _UNIT_IN_BRACKETS.sub(r"\1", text)


def _sentences(text: str) -> list[tuple[str, bool]]:
    """Return each sentence without its end, and True for a question. A displayed formula may span several lines."""
    text = re.sub(_FORMULA, lambda formula: formula.group().replace("\n", " "), text.strip(), flags=re.DOTALL)
    sentences, start = [], 0
    for end in _END.finditer(text):
        if end["end"]:
            sentences.append((text[start : end.start()], end["question"] is not None))
            start = end.end()
    return [*sentences, (text[start:], False)]


def _last_value(text: str) -> str:
    """Return the value of the last sentence that has one, or a text of a few words without a value.

    A question has none, and a remark such as "Some would say 5."
    """
    text = in_english(text)
    if "b)" in text and (listed := _listed_parts(text)):
        return listed
    sentences = _sentences(text)
    if len(sentences) == 1:
        return _value(text)
    first = sentences[0][0].strip(_AROUND)
    affirmed = f"{first}, " if _AFFIRMED.fullmatch(f"{first}, ") else ""  # "Yes. It has 3 roots."
    for sentence, asks in reversed(sentences):
        skipped = (asks and "=" not in sentence and _has_prose(sentence)) or _REMARK.search(sentence)
        if not skipped and _VALUED.search(sentence) and (value := _value(sentence)):
            return affirmed + value
    return "" if any(_VALUED.search(sentence) for sentence, _ in sentences) else _value(text)


def _listed_parts(text: str) -> str:
    r"""Return the values of the last lines if each is a part with one value: "(a) 3\n(b) 5"."""
    parts = [part for line in text.strip().split("\n")[-5:] if (part := _PART.fullmatch(line.strip(_AROUND)))]
    names = "".join(part[1] for part in parts)
    if len(parts) < 2 or names not in ("ab", "abc", "abcd") or any(_has_prose(part[2]) for part in parts):
        return ""
    return ", ".join(part[2].strip(" .,;") for part in parts)


def _value_behind(text: str, label: str) -> str:
    """Return the value of the sentence behind a label. A label with a colon may introduce a whole solution."""
    if quoted := _QUOTED.match(text):  # JSON
        return _value(quoted[1], behind=True)
    (sentence, _), *later = _sentences(in_english(text))
    if not _COPULA.search(label) and not _Sentence(sentence).begins_with_value:
        return ""  # "The answer to question 3 would be 5"
    value = _value(sentence, behind=True)
    introduces = ":" in label and ("=" in sentence or not sentence.startswith(value))
    return "" if introduces and any(_VALUED.search(other) for other, _ in later) else value


def _has_prose(text: str) -> bool:
    return _PROSE.search(_NO_PROSE.sub("", text)) is not None


def _is_value(before: re.Match[str] | None, item: re.Match[str], after: re.Match[str] | None) -> bool:
    """Return True for a number, a formula with a command, and a choice. "A" may be an article."""
    text = item.group()
    if text.endswith(":") and before is not None and after is not None and before.group()[0].isupper():
        return False  # "Step 5: "
    if before is not None and before.group()[-1].isdigit() and _POWER.fullmatch(text):
        return False  # of "150 m^2"
    if _CHOICE.fullmatch(text.strip("$")):
        is_name = text != "A" or after is None or _NO_NOUN.match(after.group()) is not None
        return is_name and (before is None or before.group() != "=")
    return re.search(rf"[\dπ¼-¾⅐-⅞{CIRCLED}]", text) is not None or "\\" in text.partition("$")[2]


def _choice(text: str, item: re.Match[str]) -> str:
    """Return a choice, with the choices joined to it, or with a negation behind it."""
    several = next((s for s in _CHOICES.finditer(text) if s.start() <= item.start() < s.end()), None)
    if several and " " not in several.group().replace(", ", "").strip() and re.search(r"\w", text[several.end() :]):
        several = None  # "A, B" with text behind
    if several or _NEGATED.match(text, item.end()):
        return several.group() if several else text[item.start() :]
    return item.group().rstrip(" .,;:!?*")


def _mixed(text: str, values: list[re.Match[str]]) -> bool:
    """Return True for "44 of 50", "44 or 50" and amounts of different units in one clause: none is the answer."""
    first, second = values[:2]
    between = text[first.end() : second.start()]
    if _CHOICE.fullmatch(first.group()):
        return False
    if _JOINING.fullmatch(between):
        return True
    units = [
        re.search(r"[$€£¥₹]\s?\Z", text[: one.start()]) or re.match(r" ?[^\W\d_]+", text[one.end() :])
        for one in (first, second)
    ]
    names = {unit.group().strip() for unit in units if unit is not None}
    return None not in units and len(names) == 2 and not re.search("[,;:()]|because|since|and|or", between)


def _value(text: str, behind: bool = False) -> str:
    """Return a sentence that is one value, the value after its last equal sign, or its last value.

    Directly ``behind`` a label the first value is the answer.
    """
    text = text.strip(_AROUND).lstrip("}")
    text = text if text.endswith("...") else text.rstrip(".!" if behind else ".")
    if "than" in text:
        text = _NO_LATER.sub("", text)
    text = text.removesuffix("}" * (text.count("}") - text.count("{")))  # of the braces around the phrase
    if cells := _ROW.fullmatch(text):
        text = cells[1].strip(_AROUND)
    if not (_has_prose(text) or (behind and _CHOICE_WITH_TEXT.match(text))):
        return text
    if _MARKED.search(text) and (choice := _CHOICE_WITH_TEXT.search(text)):
        return "({}) {}".format(*filter(None, choice.groups()))
    if _AFFIRMED.match(text):
        return text
    if (compared := _COMPARED.search(text)) and _VALUED.search(text, 0, compared.start()):
        return _value(text[: compared.start()], behind)
    outside, _, inside = text.rpartition(" (")
    if outside and "=" in inside and inside.endswith(")"):  # 42 (since 6 * 7 = 42)
        result = inside.rpartition("=")[2].strip(" $)")
        return result if _value(outside, behind).strip("$").startswith(result) else text
    if (
        not text[-2:].isalpha()
        and (expression := _EXPRESSION.search(text))
        and _VARIABLE.search(expression[1])
        and _OPERATOR.search(expression[1])
    ):
        return expression[1]
    return _value_in_prose(text, behind)


class _Sentence:
    """A sentence with several words. ``behind``: it follows a label such as "the answer is" directly."""

    def __init__(self, text: str, behind: bool = False) -> None:
        self.text, self.behind = text, behind
        self.items = list(_ITEM.finditer(text))
        around = zip([None, *self.items], self.items, [*self.items[1:], None], strict=False)
        values = [item for before, item, after in around if _is_value(before, item, after)]
        self.values = values or [item for item in self.items if item["formula"]]
        self.begins_with_value = bool(self.values) and self.values[0] is self.items[0]

    @cached_property
    def equal(self) -> int:
        """The place of the last equal sign outside formulas, or -1."""
        return max((item.start() for item in self.items if item.group() == "="), default=-1)

    @cached_property
    def has_candidates(self) -> bool:
        """True if several values behind a label may be meant, and no equal sign decides."""
        several = self.behind and len(self.values) > 1 and self.equal < 0
        return several and (not self.begins_with_value or _mixed(self.text, self.values))

    @cached_property
    def chosen(self) -> re.Match[str]:
        """The value that counts: the first directly behind a label, else the first after an equal sign, or the last."""
        first, last = self.values[0], self.values[-1]
        if self.has_candidates:
            return last  # of "8 pens cost 12"
        later = [item for item in self.values if item.start() > self.equal >= 0]
        is_first = self.behind and self.begins_with_value
        chosen = later[0] if later else first if is_first else last
        if is_first and first.group().strip(_AT_END) != chosen.group().strip(_AT_END):
            # A calculation leads to the value after its equal sign. "42, because 6 * 7 = 42" begins with its value.
            pairs = [(one, two) for one, two in pairwise(self.values) if self.equal < 0 or two.start() <= self.equal]
            gaps = [self.text[one.end() : two.start()] for one, two in pairs]
            if _CAUSE.search(" ".join(gaps[:1])) or not all(map(_OPERATOR.search, gaps)):
                return first
        return chosen

    @cached_property
    def chosen_text(self) -> str:
        text = self.chosen.group()
        return text.rstrip(" ,;:!?*" if text.endswith("...") else " .,;:!?*")

    @cached_property
    def changed(self) -> re.Match[str] | None:
        """Words before the chosen value that change it, as in "minus 5"."""
        pattern, place = _CHANGED_ASCII if self.text.isascii() else _CHANGED, self.chosen.start()
        return pattern.search(self.text, max(0, place - 60), place)

    @cached_property
    def start(self) -> int:
        """The place at which the answer with the chosen value begins."""
        if self.equal >= 0 and (unsolved := _UNSOLVED.search(self.text, 0, self.equal)):
            return unsolved.start()
        return min((self.changed or self.chosen).start(), self._first_listed().start())

    def _first_listed(self) -> re.Match[str]:
        """Return the first value of a list that ends with the chosen one, as in "3, 4 and 5"."""
        values, chosen = self.values, self.chosen
        if self.behind or self.equal >= 0 or len(values) < 2 or _CHOICE.fullmatch(self.chosen_text):
            return chosen
        joined = _BOTH.fullmatch(self.text, values[-2].end(), chosen.start())
        if not joined or not (joined["or"] or "=" not in values[-2].group() + self.chosen_text):
            return chosen
        # The list begins behind the last gap that is not a comma.
        ends = [one.end() for one, two in pairwise(values[:-1]) if self.text[one.end() - 1 : two.start()] != ", "]
        return next(one for one in values if one.start() >= max(ends, default=0))


# The readings of a sentence, each with the answer or None. The first answer wins.


def _cut_calculation(sentence: _Sentence) -> str | None:
    """Return a sentence that was cut behind an equal sign."""
    return sentence.text if sentence.text.endswith("=") else None


def _before_purpose(sentence: _Sentence) -> str | None:
    """Return the value before a clause that only describes it: "12 dollars to buy 5 pens"."""
    text, values = sentence.text, sentence.values
    if len(values) < 2 or "=" in text:
        return None
    purposes = (_PURPOSE.search(text, one.end(), two.start()) for one, two in pairwise(values))
    purpose = next(filter(None, purposes), None)
    if purpose is None or _NEW_CLAUSE.search(text, purpose.end(), values[-1].start()):
        return None
    if purpose.group()[-1] == " " and _COPULA.search(text, purpose.end()):
        return None  # "12 for 3 hours is 36"
    return _value(text[: purpose.start()], sentence.behind)


def _few_words(sentence: _Sentence) -> str | None:
    """Return the whole of a short sentence without a value, or with a value at its beginning."""
    text, values = sentence.text, sentence.values
    if len(sentence.items) > 5:
        return None
    if not values:
        return text
    if "=" in text or not sentence.begins_with_value or (sentence.behind and len(values) > 1):
        return None
    return _choice(text, values[0]) if _CHOICE.fullmatch(values[0].group()) else text


def _without_value(sentence: _Sentence) -> str | None:
    return None if sentence.values else ""


def _solutions(sentence: _Sentence) -> str | None:
    """Return several values of one name: "x = 2 or x = -3"."""
    if sentence.behind and sentence.begins_with_value:
        return None
    solutions = _SOLUTIONS.search(sentence.text)
    return solutions.group() if solutions else None


def _undecided(sentence: _Sentence) -> str | None:
    """Return the whole sentence if several values behind a label may be meant."""
    text, values = sentence.text, sentence.values
    if not sentence.has_candidates:
        return None
    is_predicate = _PREDICATE.search(text, values[-2].end(), values[-1].start()) is not None
    return None if is_predicate and not _ALTERNATIVE.search(text) else text


def _alternatives(sentence: _Sentence) -> str | None:
    """Return two values of which one is not meant: "5 or maybe 6"."""
    text, chosen = sentence.text, sentence.chosen
    for one, two in pairwise(sentence.values):
        is_near = one.start() > sentence.equal and two.start() - one.end() < 40
        between = text[one.end() : two.start()] if chosen in (one, two) and is_near else ""
        if _OTHERWISE.search(between) and not _SO.search(between):
            return text[one.start() :]
    return None


def _chosen_choice(sentence: _Sentence) -> str | None:
    is_choice = _CHOICE.fullmatch(sentence.chosen_text) and not sentence.changed
    return _choice(sentence.text, sentence.chosen) if is_choice else None


def _with_more_terms(sentence: _Sentence) -> str | None:
    """Return the chosen value with the terms behind it: "- 3" behind "-5x"."""
    text, chosen = sentence.text, sentence.chosen
    more = _MORE.match(text, chosen.end()) if sentence.equal >= 0 else None
    return text[sentence.start : more.end()] if more and not _NOT.search(text, 0, chosen.start()) else None


def _with_unit(sentence: _Sentence) -> str:
    """Return the chosen value with the words before it that change it, and with the unit behind it."""
    text, chosen, value = sentence.text, sentence.chosen, sentence.chosen_text
    unit = _UNIT.match(text, chosen.end()) if value == chosen.group() else None
    if unit and not text.isascii() and _SHORT.match(unit.group()) and read_unit(unit.group()) is None:
        unit = None  # "19 em" in Vietnamese: not a product
    return text[sentence.start : unit.end() if unit else chosen.start() + len(value)].strip()


_READINGS: tuple[Callable[[_Sentence], str | None], ...] = (
    *(_cut_calculation, _before_purpose, _few_words, _without_value, _solutions),
    *(_undecided, _alternatives, _chosen_choice, _with_more_terms, _with_unit),
)


def _value_in_prose(text: str, behind: bool) -> str:
    """Return the value of a sentence with several words: after its last equal sign, or the first or last value."""
    sentence = _Sentence(text, behind)
    return next(answer for read in _READINGS if (answer := read(sentence)) is not None)
