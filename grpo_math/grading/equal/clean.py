r"""Normalise characters and LaTeX commands that mean the same, without changing a value.

>>> clean(r"\dfrac{1}{2}"), clean("x² ≤ ４２"), clean(r"$74^\circ$"), clean("−1½")
('\\frac{1}{2}', 'x^{2} <= 42', '74°', '-1\\frac{1}{2}')
>>> clean("٤٢"), clean("1\u00a0000"), clean(r"1\,000"), clean(r"\left(1,2\right]"), clean(r"5\%"), clean("$5")
('42', '1 000', '1000', '(1,2]', '5%', '$5')
>>> clean(r"\dfrac12"), clean("5\u200b"), clean("four apples"), clean("..")
('\\frac12', '5', '4 apples', '.')

Does not parse, and does not strip units.
"""

import re
import unicodedata
from functools import lru_cache

from grpo_math.grading.equal import spelled
from grpo_math.grading.equal.text import DOLLAR, MAX_CHARACTERS, strip_wrappers

CACHED_CHARACTERS = 300  # gold answers and ordinary answers recur; a cache of hostile answers would only fill memory

CHARACTERS = {
    **dict.fromkeys("−–—‒﹣－‐‑", "-"),
    **dict.fromkeys("×∗⋅·∙•✕", "*"),
    **dict.fromkeys("÷∕⁄", "/"),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad\u0000\u200e\u200f", ""),
    **dict.fromkeys("\u00a0\u2009\u202f\u2007\u2002\u2003\u3000", " "),
    "≤": "<=", "⩽": "<=", "≥": ">=", "⩾": ">=", "≠": "\\ne ", "∞": "\\infty ", "π": "\\pi ", "√": "\\sqrt ",
    "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ", "±": "\\pm ", "≈": "\\approx ", "∓": "\\mp ",
    "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "γ": "\\gamma ", "λ": "\\lambda ", "φ": "\\phi ", "º": "°",
    "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "“": '"', "”": '"', "‘": "'", "’": "'", "，": ",", "；": ";", "：": ":",
    "（": "(", "）": ")", "∠": "\\angle ", "￥": "¥", "、": ",", "‰": "\\permille ",
    **{chr(0x2460 + n): chr(0xE000 + n) for n in range(20)},  # circled digits are names: NFKC would make them digits
}  # fmt: skip
TABLE = str.maketrans(CHARACTERS)
SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
VULGAR = re.compile("[¼-¾⅐-⅞↉]")

MONEY = "\x01"  # replaces an escaped dollar sign while the dollar signs around mathematics are removed
COMMANDS = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), "\\frac"),
    **dict.fromkeys(("cdot", "times", "ast", "cdotp"), "*"),
    **dict.fromkeys(("le", "leq", "leqslant", "leqq"), "<="),
    **dict.fromkeys(("ge", "geq", "geqslant", "geqq"), ">="),
    **dict.fromkeys(("neq", "not="), "\\ne "),
    **dict.fromkeys(("left", "right", "bigl", "bigr", "Bigl", "Bigr", "big", "Big", "bigg", "Bigg", "limits"), ""),
    **dict.fromkeys(("displaystyle", "textstyle", "scriptstyle", "rm", "bf", "nonumber", "middle"), ""),
    **dict.fromkeys(("quad", "qquad", "enspace", "thinspace", "hfill", "hspace"), " "),
    **dict.fromkeys(("textbf", "textit", "textrm", "texttt", "textsf", "mbox", "hbox", "textnormal"), "\\text"),
    **dict.fromkeys(("lvert", "rvert", "vert", "mid"), "|"),
    **dict.fromkeys(("land", "wedge"), " and "),
    **dict.fromkeys(("lor", "vee"), " or "),
    **dict.fromkeys(("to", "rightarrow"), "\\to "),
    "div": "/", "lt": "<", "gt": ">", "degree": "°", "colon": ":", "lbrack": "[", "rbrack": "]", "ln": "\\ln ",
    "langle": "(", "rangle": ")", "textdollar": MONEY, "pounds": "£", "euro": "€", "varphi": "\\phi ",
    "backslash": "\\setminus ", "iff": "=", "simeq": "\\approx ", "lbrace": "\\{", "rbrace": "\\}",
    "varnothing": "\\emptyset ",
}  # fmt: skip
COMMAND = re.compile(r"\\(not=|[A-Za-z]+)\s?")
SPACE = re.compile(r"\\\\|\\[,;:> ]|~")  # a double backslash ends a row
SET_BUILDER = re.compile(  # A = \\{x | x > 1\\}
    r"\A(?:[A-Z][^={}]{0,30}= ?)?\\?\{ ?[a-z](?: ?\\in[^|:]{1,20})? ?[|:] ?([^|{}](?:[^{}]|\{[^{}]*\}){0,200}?) ?"
    r"\\?\}\Z"
)
RATIO_WORDS = re.compile(r"\A((?!0+ )\d+(?:\.\d+)?) to (\d+(?:\.\d+)?)\Z")
PERCENT = re.compile(r"(?:(?<=[\d)}]) ?|(?<= ))\b(?:per ?cent|pct)\b\.?", re.IGNORECASE)
ASIDE = re.compile(r"(approx(?:imately|\.)?|exactly|rounded)|[a-z \-]{3,40}", re.IGNORECASE)
SUBSCRIPT = re.compile(
    r"_\s*(?:\{\s*)?\\(?:text\s*\{\s*([A-Za-z0-9 ,.]{1,20}?)\s*\}|(max|min|lim|sup|inf)(?![A-Za-z]))(?:\s*\})?"
)
DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))")
BOLD_MATH = re.compile(
    r"\\(?:mathbf|mathit|mathsf|mathnormal|boldsymbol|bm)\s*(?=\{[^{}]{0,200}\\)"
)  # around a formula
FONT = re.compile(
    r"\\(?:operatorname(?=\*?\s*\{[A-Za-z ]*\})"
    r"|mathrm|mathbf|mathit|mathsf|mathnormal|boldsymbol|bm|vec|overrightarrow)(?![A-Za-z])\*?\s*"
)
INNER_DOLLAR = re.compile(r"(?<=[\w)}])\$+(?=\w)")  # between two formulas that must stay separate
QUAD = re.compile(  # between two values: a list
    r"(?<=[\w)}\]])(?<!\band)(?<!\bor)\s*(?:\\q?quad(?![A-Za-z])\s*)+(?=[-\d(\[]|[A-Za-z](?![A-Za-z])|[A-Z]{2,3}\s*=|\\(?:[dt]?frac|sqrt|pi)(?![A-Za-z])"
    r"|\\text\s*\{\s*\(?[A-JMO-UX-Z](?![A-Za-z]))"
)
JOINS = re.compile(  # words in \text between two values, or next to a value
    r"\\(?:text|textrm|mbox|mathrm)\s*\{\s*,?\s*(and|or|to|\(approximately\))\s*,?\s*\}"
)
WHOLE_TEXT = re.compile(r"\A\\text\s*\{([^{}]*\d[^{}]*)\}\Z")
EQUATIONS = re.compile(r"(?<=\w)[^\S\n]*\n\s*(?=[A-Za-z]\s?=)")  # line by line
ALIGNED = re.compile(r"&\s*(?=\\?(?:=|equiv|approx|[lg]eq?)(?![A-Za-z]))")  # "x &= 5"
THIN = re.compile(r"(?<=\d)(?:\\[,:;! ]|\{,\}|,\\!|~)(?=\d{3}(?!\d))")

CHOSEN = re.compile(r"(?<![A-Za-z\\])([CA])_\{?(\d+)\}?\^\{?(\d+)\}?")  # C_{10}^3, and arrangements A_5^2
REPEATING = re.compile(r"(?<![\d.])(\d*\.\d*)\((\d{1,60})\)")  # 0.(27)
OPEN_INTERVAL = re.compile(r"\A\]([^][]+)\[\Z")
INTEGER = re.compile(
    r"\s*[,(]\s*(?:(?:\\text\s*\{)?\s*for(?: all| any| every| each)?\s*\}?\s*)?(?:\\forall\s*)?([a-z])\s*\\in\s*"
    r"\\(?:mathbb|text)\s*\{?\s*[ZN]\s*\}?(?:_\{?[+*]\}?|\^\{?[+*]\}?)?\s*\)?\Z"
)  # k\pi, k \in \mathbb{Z}


MULTIPLE = re.compile(
    r"(?!.*(?:sin|cos|tan|cot|\^|\())(?:.*[^A-Za-z\\])?([mn]) ?\\pi(?![A-Za-z])"
)  # n\pi, for any integer n
# Forms that mean the same: (pattern, replacement), in order, after the commands. Each has a line in the examples.
FORMS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (
            r"\\(?:textcolor|color)\s*\{[^{}]*\}|\\(?:label|tag\*?)\s*\{[^{}]*\}|\\(?:large|Large|LARGE|huge|Huge|small|normalsize)(?![A-Za-z])",
            "",
        ),
        (r"\\emph\s*\{", r"\\text{"),
        (r"\A\s*(?:\\(?:therefore|implies|Rightarrow|Longrightarrow|because|boldsymbol)(?![A-Za-z])|∴|⇒)\s*", ""),
        (r"\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", r"\\overline{\1\2\3}"),
        (r"\\dot\s*\{?(\d)\}?(?=\s*\Z)", r"\\overline{\1}"),
        (r"(?<![\w)])\(([0-9A-F]+)\)\s*_", r"\1_"),
        (
            r"(?<=\d)\s*\^\s*\{?\s*\\text\s*\{\s*(?:st|nd|rd|th)\s*\}\s*\}?|(?:(?<=1)st|(?<=2)nd|(?<=3)rd|(?<=\d)th)\b",
            "",
        ),
        (r"\A(-?[\d,.]+) [Dd]ay\Z", r"\1"),
        (r"\\text\s*\{\s*(hundred|thousand|million|billion|trillion)\b\s*", r" \1 \\text{"),
        (r"\\text\s*\{\s*\}", ""),
        (r"\\text\s*\{\s*\(([^{}()]{2,})\)\s*\}", r"\\text{\1}"),
        (
            r"\\frac\s*\{(?:\\text\s*\{)?\s*([cdkm]?m|mi|miles?|g|kg)\s*\}{1,2}\s*\{(?:\\text\s*\{)?\s*(h|hr|hour|s|min|L|m|cm)\s*\}{1,2}",
            r"\\text{ \1/\2}",
        ),
        (r"\s*\^\s*\{?\s*\\prime(?![A-Za-z])\s*\}?", "'"),
        (r"\\text\s*\{\s*([<>=]=?)\s*\}", r"\1"),
        (r"\A\\text\s*\{\s*(Rs\.?|USD|EUR)\s*\}\s*", r"\1 "),
        (r"_\s*\{?\s*(?:\\text\s*\{\s*)?\\?(?:max|min)\s*\}{0,2}(?=\s*=)", ""),
        (r"\\left\s*\||\\right\s*\.|\|\s*\.(?=-?\d)", "|"),
        (r"\A\\begin\s*\{cases\}(?=[^&]*=[^&]*\\\\)([^&]*?)[.,;]?\s*\\end\s*\{cases\}\Z", r"\1"),
        (r"\A(?!.*\\begin)(.*?[^\s,.;])[,;]?\s*\\\\\s*(?=[A-Za-z]\S* ?=|[a-z] ?[+-])", r"\1, "),
        (r"(?:,\s*|\s+|\\text\s*\{\s*,?\s*)(?:for (?:all|every|any|each)\b|\\forall(?![A-Za-z])).{1,80}\Z", ""),
        (r"(?<=[\w)}]),\s*[a-z]\s*\\in\s*\\(?:mathbb|text)\s*\{?\s*R\s*\}?(?:_\{?\+\}?|\^\{?\+\}?)?\Z", ""),
        (r"\A\\text\s*\{\s*(?i:answer|final answer|total|sum|about|result)\s*:?\s*(?:\}\s*|(?=[^{}]*\}\Z))", r""),
        (r"\A(?i:the )?(?i:final )?(?i:answer)\s*(?:is)?:\s*", ""),
    )
]
SENTENCE = re.compile(  # "The minimum value of x is 4": the value at the end of a sentence
    r"\A(?:\\text\s*\{\s*)?[Tt]he\b(?:(?!\bnot\b|\bor\b)[^=<>]){1,160}"
    r"(?:\b(?:is|are|value of|equals)\b|=)\s*\}?\s*(?=\S)(?!.*\b[A-Za-z]{4,}\b(?<!frac)(?<!sqrt))"
)


def clean(text: str) -> str:
    """Return the normal form of an answer."""
    return _clean(text) if len(text) <= CACHED_CHARACTERS else _clean.__wrapped__(text)


@lru_cache(maxsize=8192)
def _clean(text: str) -> str:
    text = strip_wrappers(text.replace("\0", "") if text.isascii() else _ascii(text))
    if len(text) > MAX_CHARACTERS:
        return text
    if "\\" in text or "$" in text or "~" in text or "{,}" in text:
        text = DOLLAR.sub(MONEY, text.rstrip("\\ "))
        if "\\\\" in text:
            text = _single_backslashes(text)
        text = re.sub(r",\\!\s*", "{,}", text).replace("\\!", "")
        text = THIN.sub(lambda m: "," if "," in m.group() and m.group() != "\\," else "", text)
        text = SPACE.sub(lambda m: m.group() if m.group() == "\\\\" else " ", text)
        if "quad" in text:
            text = re.sub(r"\\q?quad(?=[a-z])", " ", QUAD.sub(", ", JOINS.sub(r" \1 ", text)))
        text = DEGREES.sub("°", text)
        text = BOLD_MATH.sub("", text)
        text = FONT.sub(lambda m: "\\text" if "math" in m.group() or "operator" in m.group() else " ", text)
        text = COMMAND.sub(lambda m: COMMANDS.get(m.group(1), m.group()), text)
        text = SUBSCRIPT.sub(lambda m: f"_{{{m[1] or m[2]}}}", text)
        text = re.sub(r"(?<![\d} ])\\text\s*\{\s*([A-J]|-?[\d.,]+)\s*\}(?![\d.])", r"\1", text)
        for pattern, replacement in FORMS:
            text = pattern.sub(replacement, text)
        text = JOINS.sub(r" \1 ", WHOLE_TEXT.sub(r"\1", text))
        if text.count("$") % 2:
            text = re.sub(r"\$(?=\s?[\d.])", MONEY, text, count=1)
        text = (
            INNER_DOLLAR.sub(" ", text)
            .replace("$", "")
            .replace(MONEY, "$")
            .replace("\\%", "%")
            .replace("\\#", "#")
            .replace("\\&", "&&")
        )
        text = re.sub(r"\\[hv]?phantom\s*(?:\{[^{}]*\}|\S)|^\s*\\approx", " ", text)
    if "&" in text:
        text = ALIGNED.sub("", text)
    if "\n" in text:
        text = EQUATIONS.sub(", ", text)
    text = re.sub(r"\s+", " ", text).strip()
    for pattern, replacement in FORMS if "\\" not in text else ():
        text = pattern.sub(replacement, text)
    text = SENTENCE.sub("", text)
    text = RATIO_WORDS.sub(r"\1:\2", SET_BUILDER.sub(r"\1", text))
    if text.endswith(")"):
        text = _without_aside(text)
    text = CHOSEN.sub(lambda m: f"{'C' if m[1] == 'C' else 'P'}({m[2]}, {m[3]})", text)
    text = OPEN_INTERVAL.sub(r"(\1)", REPEATING.sub(r"\1\\overline{\2}", text))
    if integer := INTEGER.search(text):
        text = re.sub(rf"(?<![A-Za-z\\]){integer[1]}(?![A-Za-z])", "k", text[: integer.start()])
    elif (multiple := MULTIPLE.match(text)) and not re.search(r"(?<![A-Za-z\\])k(?![A-Za-z])", text):
        text = re.sub(rf"(?<![A-Za-z\\]){multiple[1]}(?![A-Za-z])", "k", text)
    text = PERCENT.sub("%", spelled.digits(text))
    return strip_wrappers(re.sub(r"\s+", " ", text.removeprefix("=")))


def _without_aside(text: str) -> str:
    """Remove "(approximately)", and a number in words after the same number in digits: "7 (seven)"."""
    before, _, inside = text[:-1].rpartition(" (")
    aside, number = ASIDE.fullmatch(inside), re.search(r"-?\d.*", before)
    if aside is None or number is None:
        return text
    return before if aside[1] or spelled.digits(inside) == number.group().replace(",", "") else text


def _single_backslashes(text: str) -> str:
    r"""Replace doubled escapes, ``\\\\le`` by ``\\le``, unless the double backslash ends a row of a matrix."""
    return text if "\\begin" in text else re.sub(r"\\\\(?=[A-Za-z]{2})", r"\\", text)


def _ascii(text: str) -> str:
    text = VULGAR.sub(lambda m: f"\\frac{{{unicodedata.normalize('NFKC', m.group()).replace('⁄', '}{')}}}", text)
    text = re.sub("[⁰¹²³⁴-⁹⁻⁺ⁿ]+", lambda m: "^{" + m.group().translate(SUPERSCRIPT) + "}", text)
    text = re.sub(r"√\s*(\d+|[a-z])(?![\d.])", r"\\sqrt{\1}", text.translate({ord("∛"): "\\sqrt[3]"}))
    text = unicodedata.normalize("NFKC", text.translate(TABLE))
    if len(text) > MAX_CHARACTERS:  # NFKC can turn one character into eighteen
        return text
    text = text.translate(TABLE)
    if text.isascii():
        return text
    return "".join(str(unicodedata.decimal(c)) if unicodedata.category(c) == "Nd" else c for c in text)
