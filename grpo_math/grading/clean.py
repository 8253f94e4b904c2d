r"""One spelling for characters and LaTeX commands that mean the same, and nothing that changes a value.

>>> clean(r"\dfrac{1}{2}"), clean("x² ≤ ４２"), clean(r"$74^\circ$"), clean("−1½")
('\\frac{1}{2}', 'x^{2} <= 42', '74°', '-1\\frac{1}{2}')

Does not parse, and does not strip units.
"""

import re
import unicodedata
from functools import lru_cache

from grpo_math.grading.extract import strip_wrappers

CACHED_CHARACTERS = 300  # golds and ordinary answers recur; a cache of hostile ones would only fill memory

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
    "（": "(", "）": ")", "∠": "\\angle ", "￥": "¥",
}  # fmt: skip
TABLE = str.maketrans(CHARACTERS)
SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
VULGAR = re.compile("[¼-¾⅐-⅞↉]")

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
    "langle": "(", "rangle": ")", "textdollar": "", "pounds": "", "euro": "", "varphi": "\\phi ",
    "backslash": "\\setminus ", "iff": "=", "simeq": "\\approx ", "lbrace": "\\{", "rbrace": "\\}",
    "varnothing": "\\emptyset ",
}  # fmt: skip
COMMAND = re.compile(r"\\(not=|[A-Za-z]+)\s?")
COUNTING = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)
NUMBER_WORDS = {word: value for value, word in enumerate(COUNTING.split())}
LEADING_WORD = re.compile(rf"\A(?:{'|'.join(NUMBER_WORDS)})(?= [a-z])", re.IGNORECASE)
SPACE = re.compile(r"\\\\|\\[,;:> ]|~")  # a double backslash ends a row
SET_BUILDER = re.compile(r"\A\\\{ ?[a-z](?: ?\\in[^|:]{1,20})? ?[|:] ?(.{1,200}?) ?\\\}\Z")
RATIO_WORDS = re.compile(r"\A(\d+(?:\.\d+)?) to (\d+(?:\.\d+)?)\Z")
ASIDE = re.compile(r"(?<=\d) \([A-Za-z][A-Za-z ,.\-]{1,40}\)$")
DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))")
FONT = re.compile(r"\\(?:mathrm|operatorname|mathbf|mathit|mathsf|mathnormal|boldsymbol|bm|vec|overrightarrow)\*?\s*")
THIN = re.compile(r"(?<=\d)(?:\\[,:;! ]|\{,\}|,\\!|~)(?=\d{3}(?!\d))")


def clean(text: str) -> str:
    """The canonical spelling of an answer."""
    return _clean(text) if len(text) <= CACHED_CHARACTERS else _clean.__wrapped__(text)


@lru_cache(maxsize=8192)
def _clean(text: str) -> str:
    text = strip_wrappers(text.replace("\0", "") if text.isascii() else _ascii(text))
    if "\\" in text or "$" in text or "~" in text or "{,}" in text:
        if "\\\\" in text:
            text = _single_backslashes(text)
        text = re.sub(r",\\!\s*", "{,}", text).replace("\\!", "")
        text = THIN.sub(lambda m: "," if "," in m.group() and m.group() != "\\," else "", text)
        text = SPACE.sub(lambda m: m.group() if m.group() == "\\\\" else " ", text)
        text = re.sub(r"\\q?quad(?=[a-z])", " ", text)
        text = DEGREES.sub("°", text)
        text = FONT.sub(lambda m: "\\text" if "math" in m.group() or "operator" in m.group() else "", text)
        text = COMMAND.sub(lambda m: COMMANDS.get(m.group(1), m.group()), text)
        text = re.sub(r"(?<![\d} ])\\text\s*\{\s*([A-J]|-?[\d.,]+)\s*\}", r"\1", text)
        text = re.sub(r"\\text\s*\{\s*,?\s*(and|or)\s*,?\s*\}", r" \1 ", text)
        text = text.replace("\\$", "").replace("$", "").replace("\\%", "%").replace("\\#", "#").replace("\\&", "&&")
        text = re.sub(r"\\[hv]?phantom\s*(?:\{[^{}]*\}|\S)|^\s*\\approx", " ", text)
    if "000000000000" in text:
        text = re.sub(r"(?<![\d.])0{12,}(?=\d)", "", text)
    text = RATIO_WORDS.sub(r"\1:\2", SET_BUILDER.sub(r"\1", text))
    text = ASIDE.sub("", text) if text.endswith(")") else text
    text = LEADING_WORD.sub(lambda m: str(NUMBER_WORDS[m.group().lower()]), text)
    if text[:1] in ("€", "£", "¥", "₹", "="):
        text = text[1:]
    return strip_wrappers(re.sub(r"\s+", " ", text))


def _single_backslashes(text: str) -> str:
    r"""Undo doubled escapes: ``\\\\le`` is ``\\le``, unless the double backslash ends a row of a matrix."""
    if re.search(r"\\\\(?:begin|frac|dfrac|sqrt|left)", text) and not re.search(r"(?<!\\)\\(?:begin|frac|sqrt)", text):
        return text.replace("\\\\", "\\")
    return text if "\\begin" in text else re.sub(r"\\\\(?=[A-Za-z]{2})", r"\\", text)


def _ascii(text: str) -> str:
    text = VULGAR.sub(lambda m: f"\\frac{{{unicodedata.normalize('NFKC', m.group()).replace('⁄', '}{')}}}", text)
    text = re.sub("[⁰¹²³⁴-⁹⁻⁺ⁿ]+", lambda m: "^{" + m.group().translate(SUPERSCRIPT) + "}", text)
    text = re.sub(r"√\s*(\d+|[a-z])(?![\d.])", r"\\sqrt{\1}", text.translate({ord("∛"): "\\sqrt[3]"}))
    text = unicodedata.normalize("NFKC", text.translate(TABLE)).translate(TABLE)
    if text.isascii():
        return text
    return "".join(str(unicodedata.decimal(c)) if unicodedata.category(c) == "Nd" else c for c in text)
