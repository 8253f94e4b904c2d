r"""Normalise characters and LaTeX commands that mean the same, without changing a value.

>>> clean(r"\dfrac{1}{2}"), clean("x² ≤ ４２"), clean(r"$74^\circ$"), clean("−1½")
('\\frac{1}{2}', 'x^{2} <= 42', '74°', '-1\\frac{1}{2}')
>>> clean("٤٢"), clean("1\u00a0000"), clean(r"1\,000"), clean(r"\left(1,2\right]"), clean(r"5\%"), clean("$5")
('42', '1 000', '1000', '(1,2]', '5%', '$5')
>>> clean(r"\dfrac12"), clean("5\u200b"), clean("..")
('\\frac12', '5', '.')
"""

import re
import unicodedata
from functools import lru_cache
from typing import Any

from grpo_math.grading.equal.notation import ALIASES, FUNCTIONS
from grpo_math.grading.equal.text import DOLLAR, MAX_CHARACTERS, strip_wrappers
from grpo_math.grading.lexicon import CHOICE
from grpo_math.grading.vocabulary import FOREIGN, either, in_english

CACHED_CHARACTERS = 300  # gold answers and ordinary answers recur; a cache of hostile answers would only fill memory

GREEK_LETTERS = "αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΣΦΨΩ∆"
GREEK_NAMES = """
alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega
Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega Delta
""".split()  # noqa: SIM905
CHARACTERS = {
    **dict.fromkeys("−–—‒﹣－‐‑", "-"),
    **dict.fromkeys("×∗⋅·∙•✕", "*"),
    **dict.fromkeys("÷∕⁄", "/"),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad\u0000\u200e\u200f", ""),
    **dict.fromkeys("\u00a0\u2009\u202f\u2007\u2002\u2003\u3000", " "),
    "≤": "<=", "⩽": "<=", "≥": ">=", "⩾": ">=", "≠": "\\ne ", "∞": "\\infty ", "π": "\\pi ", "√": "\\sqrt ",
    "⊂": "\\subset ", "⊃": "\\supset ", "⊆": "\\subseteq ", "⊇": "\\supseteq ",
    "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ", "±": "\\pm ", "≈": "\\approx ", "∓": "\\mp ",
    **{letter: f"\\{name} " for letter, name in zip(GREEK_LETTERS, GREEK_NAMES, strict=True)}, "º": "°",
    "→": "\\to ", "≡": "\\equiv ", "⌊": "\\lfloor ", "⌋": "\\rfloor ",
    "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "“": '"', "”": '"', "‘": "'", "’": "'", "，": ",", "；": ";", "：": ":",
    "（": "(", "）": ")", "∠": "\\angle ", "￥": "¥", "、": ",", "‰": "\\permille ",
    **{chr(0x2460 + n): chr(0xE000 + n) for n in range(20)},  # circled digits are names: NFKC would make them digits
}  # fmt: skip
TABLE = str.maketrans(CHARACTERS)
SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
# A word with an accent behind a number is a unit: "48 ευρώ".
GREEK_UNIT = re.compile(
    rf"(?<=\d) (?!{either('after', 'and', 'or')})(?=[α-ω]{{0,20}}[άέήίόύώ])[α-ωάέήίόύώ]{{3,20}}\.?(?=\s*\}}?\Z)"
)
FEET = re.compile(r"\A(\d{1,9})\s?['′’]\s?(\d{1,2}(?:\.\d{1,9})?)\s?(?:\"|″|”|['′’]{2})?\Z")  # 5'10"
MAGNITUDES = {"K": "thousand", "M": "million", "B": "billion"}
DOTS = re.compile(r"(?<=\.)((\d{1,3}?)\2\2)(?:\.{3}|…)")  # 0.333...
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
    **dict.fromkeys(("quad", "qquad", "enspace", "thinspace", "hfill"), " "),
    **dict.fromkeys(("textbf", "textit", "textrm", "texttt", "textsf", "mbox", "hbox", "textnormal", "emph"), "\\text"),
    **dict.fromkeys(("lvert", "rvert", "vert", "mid"), "|"),
    **dict.fromkeys(("land", "wedge"), " and "),
    **dict.fromkeys(("lor", "vee"), " or "),
    **dict.fromkeys(("to", "rightarrow"), "\\to "),
    "div": "/", "lt": "<", "gt": ">", "degree": "°", "colon": ":", "lbrack": "[", "rbrack": "]", "ln": "\\ln ",
    "langle": "(", "rangle": ")", "textdollar": MONEY, "pounds": "£", "euro": "€", "varphi": "\\phi ",
    "backslash": "\\setminus ", "iff": "=", "simeq": "\\approx ", "lbrace": "\\{", "rbrace": "\\}",
    "varnothing": "\\emptyset ", "varepsilon": "\\epsilon ",
}  # fmt: skip
COMMAND = re.compile(r"\\(not=|[A-Za-z]+)\s?")
# Spaces, degrees and fonts that mean the same, in order, before the commands: (sign, pattern, replacement). Each text
# that the pattern matches contains the sign.
_I, _J, _K = (
    rf"\\(?:math(?:bf|rm)|boldsymbol|bm|vec|[wW]?hat|text|overrightarrow)\s*(?:\{{\s*)?\\?{letter}(?:math)?\s*\}}?"
    for letter in "ijk"
)
_INSIDE = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*"  # balanced braces
SPELLINGS = [
    (sign, re.compile(pattern), replacement)
    for sign, pattern, replacement in (
        # 2i - 3j in bold is the vector (2, -3): a unit vector becomes the factor (1)
        (
            "\\",
            rf"\A([^,;=]{{0,60}}?){_I}\s*([+-][^,;=]{{0,60}}?){_J}\s*([+-][^,;=]{{0,60}}?){_K}\s*\Z",
            r"(\1(1),\2(1),\3(1))",
        ),
        ("\\", rf"\A([^,;=]{{0,60}}?){_I}\s*([+-][^,;=]{{0,60}}?){_J}\s*\Z", r"(\1(1),\2(1))"),
        ("\\\\", r"(\\\\)\s*\[-?[\d.]+\s*(?:pt|ex|em|mm|cm|in)\]", r"\1"),  # the distance between two rows
        ("\\", rf"\A\\(?:mathbf|boldsymbol|bm)\s*\{{((?![A-Za-z]*\}}){_INSIDE})\}}\Z", r"\1"),
        # Braces around a whole answer. {1, 2} and {x | x > 1} are sets.
        ("{", rf"\A\{{((?![^,]*,(?!.*\\cup)|.*(?:[|:]|\\mid)){_INSIDE})\}}\Z", r"\1"),
        (r",\!", r",\\!\s*", ","),
        (r"\*", r"\\\*", "*"),  # Markdown
        ("{:}", r"\{:\}", ":"),
        (r"\!", r"\\!", ""),
        ("{,}", r"(?<=\d)(?<!\b0)\{,\}(?=\d{3}(?!\d))", ","),  # 1{,}000
        ("{,}", r"(?<=\d)\{,\}(?=\d)", "."),  # 2{,}5
        ("", r"(?<=\d)(?:\\[,:; ]|~)(?=\d{3}(?!\d))", ""),  # 1\,000
        ("", r"(?<!\\)((?:\\\\)*)\\[,;:> ]|~", r"\1 "),  # a double backslash ends a row
        ("^", r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))", "°"),
        ("\\", r"\\(?:mathbf|mathit|mathsf|mathnormal|boldsymbol|bm)\s*(?=\{[^{}]{0,200}\\)", ""),  # around a formula
        # Functions in an upright font. \\text{ min} and \\text{ sec} are units.
        (
            "\\",
            r"\\(?:operatorname\*?|(?:mathrm|text)(?! ?\{ ?(?:min|max|sec)))"
            rf"\s*\{{\s*({'|'.join(FUNCTIONS | ALIASES.keys())})\s*\}}",
            r"\\\1 ",
        ),
        (
            "\\",
            r"\\(?:operatorname(?=\*?\s*\{[A-Za-z ]*\})|(?:mathrm|mathbf|mathit|mathsf|mathnormal)(?![A-Za-z]))\*?\s*",
            r"\\text",
        ),
        ("\\", r"\\(?:boldsymbol|bm|vec|overrightarrow)(?![A-Za-z])\*?\s*", " "),
    )
]
PERCENT = re.compile(r"(?:(?<=[\d)}]) ?|(?<= ))\b(?:per ?cent|pct)\b\.?", re.IGNORECASE)
PARENTHESIS = re.compile(r"(?:approx(?:imately|\.)?|exactly|rounded)\)", re.IGNORECASE)
INNER_DOLLAR = re.compile(r"(?<=[\w)}])\$+(?=\w)")  # between two formulas that must stay separate
QUAD = re.compile(  # between two values: a list
    r"(?<=[\w)}\]])(?<!\band)(?<!\bor)\s*(?:\\q?quad(?![A-Za-z])\s*)+(?=[-\d(\[]|[A-Za-z](?![A-Za-z])|[A-Z]{2,3}\s*=|\\(?:[dt]?frac|sqrt|pi)(?![A-Za-z])"
    r"|\\text\s*\{\s*\(?[A-JMO-UX-Z](?![A-Za-z]))"
)
JOINS = re.compile(  # words in \text between two values, or next to a value
    r" ?\\(?:text|textrm|mbox|mathrm)\s*\{\s*,?\s*(and|or|to|\(approximately\))\s*,?\s*\} ?"
)
EQUATIONS = re.compile(r"(?<=\w)[^\S\n]*\n\s*(?=[A-Za-z]\s?=)")  # line by line
INTEGER = re.compile(
    r"\s*(?:[,(]|(?=\\text|for|where))\s*(?:(?:\\text\s*\{)?\s*(?:for|where|with)(?: all| any| every| each)?\s*\}?\s*)?"
    r"(?:\\forall\s*)?(?P<name>[a-z])\s*(?:\\in\s*\\(?:mathbb|text)\s*\{?\s*[ZN]\s*\}?(?:_\{?[+*]\}?|\^\{?[+*]\}?)?"
    r"|(?:\\text\s*\{)?\s*(?:is |are )?(?:an |any )?integers?\s*\}?)\s*\)?\Z"
)  # k\pi, k \in \mathbb{Z}


MULTIPLE = re.compile(
    r"(?!.*(?:sin|cos|tan|cot|\^|\())(?:.*[^A-Za-z\\])?([mn]) ?\\pi(?![A-Za-z])"
)  # n\pi, for any integer n
# Forms that mean the same, as above, after the commands. Each has a line in the examples.
FORMS: list[tuple[str, re.Pattern[str], Any]] = [
    (sign, re.compile(pattern), replacement)
    for sign, pattern, replacement in (
        (
            "_",
            r"_\s*(?:\{\s*)?\\(?:text\s*\{\s*([A-Za-z0-9 ,.]{1,20}?)\s*\}|(max|min|lim|sup|inf)(?![A-Za-z]))(?:\s*\})?",
            r"_{\1\2}",
        ),
        (r"\text", rf"(?<![\d}} ])\\text\s*\{{\s*({CHOICE}|-?[\d.,]+)\s*\}}(?![\d.])", r"\1"),
        (r"\text", r"\A\\text\s*\{([^{}]*[\d一-鿿][^{}]*)\}\Z", r"\1"),
        ("\\", JOINS.pattern, r" \1 "),
        ("(", r"(?<=\d) ?\([A-Za-z][A-Za-z ]{1,30}\)(?= ?[-+*/=])", ""),  # $30 (fee) + $42 (parts)
        (" x ", r"(?<=\d) x (?=\$?\d)", " * "),
        (
            ":",
            r"(?i:(?<=:\d\d) ?(?:\\text ?\{ ?)?([ap])\.? ?m(?![A-Za-z])\.? ?\}?)",
            lambda time: f" {time[1].lower()}m",
        ),
        ("\\", r"\\(?:[hv]?phantom|[hv]space\*?)\s*(?:\{[^{}]*\}|\S)|^\s*\\approx", " "),
        ("", r"\s*(?:\\(?:checkmark|blacksquare|qed)(?![A-Za-z])|[✓✔✅∎]\ufe0f?|\\text\s*\{\s*[.,]\s*\})\s*\Z", ""),
        ("\\", r"\A(\\(?:underline|uline|ensuremath)\s*\{)+((?:[^{}]|\{[^{}]*\})*)\}+(?= ?\\text|\Z)", r"\2"),
        ("&", r"&\s*(?=\\?(?:=|equiv|approx|[lg]eq?)(?![A-Za-z]))", ""),  # "x &= 5"
        (
            "\\",
            r"\\(?:textcolor|color)\s*\{[^{}]*\}|\\(?:label|tag\*?)\s*\{[^{}]*\}|\\(?:large|Large|LARGE|huge|Huge|small|normalsize)(?![A-Za-z])",
            "",
        ),
        ("", r"\A\s*(?:\\(?:therefore|implies|Rightarrow|Longrightarrow|because|boldsymbol)(?![A-Za-z])|∴|⇒)\s*", ""),
        (r"\dot", r"\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", r"\\overline{\1\2\3}"),
        (r"\dot", r"\\dot\s*\{?(\d)\}?(?=\s*\Z)", r"\\overline{\1}"),
        ("(", r"(?<![\w)])\(([0-9A-F]+)\)\s*_", r"\1_"),
        (".", r"(?<=\d\.)(\d+_)\{(\d+)\}", r"\1\2"),  # 0.11_{2}
        (" (or ", r" \(or ([^()]+)\)\Z", r" or \1"),
        (
            " (",
            r"(?:(?<=\d) \((?=[\d.]+(?:%| per))|(?<=%) \((?=[\d.]+\)))([\d.]+(?:%| ?per ?cent)?)\)\Z",
            r" or \1",
        ),  # 0.1 (10%)
        (r"\text", rf"\A\\text ?\{{ ?(?=\(?{CHOICE}[).:] )({_INSIDE})\}}\Z", r"\1"),  # the text of an option
        (r"\text", r"\A\\text ?\{ ?[\"'“”„«»`]+([^{}]*?)[\"'“”„«»`]+ ?\}\Z", r"\1"),
        ("\\", r"\\(?:begin|end) ?\{(?:aligned|align\*?|split|gathered|equation\*?)\}", ""),
        ("\\\\", r" ?\\\\ ?&? ?(?==)", " "),  # a chain of several lines
        (
            "(",
            r" ?(?:\\text ?\{ ?)?\((?:\\text ?\{ ?)?(?:\\approx|(?:about|approx(?:imately|\.)?|roughly) )[ }]{0,3}"
            r"([^()]+)\) ?\}?\Z",
            r" \\approx \1",  # \sqrt{2} (about 1.41)
        ),
        ("", rf"(?<=\d)(?:['’][^\W\d_]{{2,5}}|-{FOREIGN}{{2,3}})\Z", ""),  # 48'dir, 5-ый
        (")", r"(?<=\w)[,;]?(?: and)? \(?([b-e])\) ?(?=-?[\d$\\])", r", \1 = "),  # (a) 3, (b) 5
        (", b = ", r"\A\(?a\) ?(?=[^=]*, b = )", "a = "),
        (
            "",
            r"(?<=\d)\s*\^\s*\{?\s*(?:\\text\s*)?\{\s*(?:st|nd|rd|th)\s*\}\s*\}?|(?:(?<=1)st|(?<=2)nd|(?<=3)rd|(?<=\d)th)\b",
            "",
        ),
        (r"\equiv", r"(\\equiv.*)\\mod(?![a-z])", r"\1\\pmod"),
        ("项", rf"\A(\(?{CHOICE}+\)?)\s*选?项\Z", r"\1"),
        ("共", r"\A一?共有?\s*(?=\d)", ""),
        ("", r"(?<![A-Za-z\\])(?i:mph)\b", "mile per hour"),
        ("", r"(?<![A-Za-z\\])(?i:km?ph|kmh)\b", "km per hour"),
        # 1 p.m. on Monday
        (
            "day",
            r"\A(?:\\text\s*\{\s*)?(\d[\d:]*[^{}\d]{0,8}?),? (?:on )?"
            r"((?i:mon|tues|wednes|thurs|fri|satur|sun)day)\s*\}?\Z",
            r"\2 \1",
        ),
        # "12 more apples than oranges" has a unit; "12 more than x" does not
        (
            " than ",
            r"(?<=\d)(\s*(?:\\text\s*\{\s*)?(?:(?:more|fewer|less) [a-z]{3,}|[a-z]+ [a-z]{2,}er)) "
            r"than (?=[A-Za-z]{3,}(?: [A-Za-z]+)*\s*\}?\Z)",
            r"\1 ",
        ),
        (r"\triangle", r"\A\\triangle\s*[A-Z]{3}\s*\\text\s*\{\s*(?=is an? )", r"\\text{it "),
        ("", r"(?<=\d)\s*[万萬](?!\d)", "*10^4 "),
        ("", r"(?<=\d)\s*[亿億](?!\d)", "*10^8 "),
        ("", r"(?<=\d) ?(?:lakhs?|lacs?|लाख|লাখ|লক্ষ)(?![^\W_])", "*10^5 "),
        ("", r"(?<=\d) ?(?:crores?|करोड़|কোটি)(?![^\W_])", "*10^7 "),
        ("$", r"(?<=\$)( ?[\d.,]*\d) ?([kKMB])\Z", lambda money: f"{money[1]} {MAGNITUDES[money[2].upper()]}"),  # $60K
        ("base ", r"(?<=[\dA-F]),? \(?(?:in )?base (\d+)\)?\Z", r"_{\1}"),
        ("/-", r"(?<=\d)/-\Z", ""),  # Rs 1500/-
        ("half", r"\Ahalf\Z", r"\\frac{1}{2}"),
        (
            "dots",
            r"(?<![\d.])(\d{0,40}\.\d{0,40}?)(\d{1,6}?)\2{2,}\s*\\[lc]?dots(?:\s*\{\s*\})?\s*\Z",
            r"\1\\overline{\2}",
        ),
        (r"\mu", r"\\mu\s*\\text\s*\{\s*", r"\\text{μ"),
        (r"\Omega", r"\\text\s*\{\s*([kMGmnp])\s*\}\s*\\Omega", r"\\text{\1Ω}"),
        (r"\pi", r"\A(.{0,60}?\\pi(?![A-Za-z]).{0,30}?)\s*(?:\\text\s*\{\s*)?\brad(?:ian)?s?\s*\}?\Z", r"\1"),
        (r"\text", r"\\text\s*\{\s*(hundred|thousand|million|billion|trillion)s?\b\s*", r" \1 \\text{"),
        (r"\text", r"\\text\s*\{\s*\}", ""),
        (
            "",
            r"\A(\d+)\s*(?:\\text\s*\{\s*)?"
            r"(?:(?:with )?(?:an? )?[Rr]emainder(?: of)?|[Rr]\.?|rem\.?|[Rr]est[eo]?|остаток|余[り数]?|나머지)"
            r"\s*\}?\s*(\d+)\Z",
            r"\1 remainder \2",
        ),
        ("o'clock", r"(?<=\d)\s*(?:\\text\s*\{\s*)?o'clock\s*\}?\Z", ":00"),
        (
            "",
            r"\A(\d{1,2})(?::|h|\.(?=.*(?:[ap]\.?m|Uhr|uur)))([0-5]\d)(?: ?(?:Uhr|uur|h))?(?= ?[ap]\.?m|\Z)",
            r"\1:\2",
        ),
        (
            "",
            r"\A(\d{1,2}) ?(?:[点點時时시] ?(\d\d) ?[分분]|(?:Uhr|uur))\Z",
            lambda clock: f"{clock[1]}:{clock[2] or '00'}",
        ),
        (
            "",
            r"(?<=\d) (?:in the (?:(morning)|afternoon|evening)|at night)\Z",
            lambda clock: " am" if clock[1] else " pm",
        ),
        ("", r"(?<=\d)['’](?=\d{3}(?!\d))", ""),  # 1'234
        (r"\text", r"\\text\s*\{\s*\(([^{}()]{2,})\)\s*\}", r"\\text{\1}"),
        (
            r"\frac",
            r"\\frac\s*\{(?:\\text\s*\{)?\s*([cdkm]?m|mi|miles?|g|kg)\s*\}{1,2}\s*\{(?:\\text\s*\{)?\s*(h|hr|hour|s|min|L|m|cm)\s*\}{1,2}",
            r"\\text{ \1/\2}",
        ),
        (r"\prime", r"\s*\^\s*\{?\s*\\prime(?![A-Za-z])\s*\}?", "'"),
        (r"\text", r"\\text\s*\{\s*([<>=]=?)\s*\}", r"\1"),
        (r"\text", r"\A\\text\s*\{\s*(Rs?\.?|[A-Z]{3}|[$€£¥₹])\s*\}\s*", r"\1 "),
        ("_", r"_\s*\{?\s*(?:\\text\s*\{\s*)?\\?(?:max|min)\s*\}{0,2}(?=\s*=)", ""),
        ("", r"\|\s*\.(?=-?\d)|\\left\s*\||\\right\s*\.", "|"),
        (
            r"\end",
            r"\A(?:\\begin\s*\{cases\}|\\\{\s*\\begin\s*\{array\}\s*\{[lcr| ]*\})(?=[^&]*=[^&]*\\\\)"
            r"([^&]*?)[.,;]?\s*\\end\s*\{(?:cases|array)\}(?:\s*\.)?\Z",
            r"\1",
        ),
        ("\\\\", r"\A(?!.*\\begin)(.*?[^\s,.;])[,;]?\s*\\\\\s*(?=[A-Za-z]\S* ?=|[a-z] ?[+-])", r"\1, "),
        ("for", r"(?:,\s*|\s+|\\text\s*\{\s*,?\s*)(?:for (?:all|every|any|each)\b|\\forall(?![A-Za-z])).{1,80}\Z", ""),
        (r"\in", r"(?<=[\w)}]),\s*[a-z]\s*\\in\s*\\(?:mathbb|text)\s*\{?\s*R\s*\}?(?:_\{?\+\}?|\^\{?\+\}?)?\Z", ""),
        (
            r"\text",
            r"\A\\text\s*\{\s*(?i:answer|final answer|total|sum|about|result)\s*:?\s*(?:\}\s*|(?=[^{}]*\}\Z))",
            r"",
        ),
        (":", r"\A(?i:the )?(?i:final )?(?i:answer|total|sum|result)\s*(?:is)?:\s*", ""),
        # "The minimum value of x is 4": the value at the end of a sentence
        (
            "he",
            r"\A(?:\\text\s*\{\s*)?[Tt]he\b(?:(?!\bnot\b|\bor\b)[^=<>]){1,160}"
            r"(?:\b(?:is|are|value of|equals)\b|=)\s*\}?\s*(?=\S)(?![a-z]{2,}\s*\}?\Z)"
            r"(?!.*\b[A-Za-z]{4,}\b(?<!frac)(?<!sqrt))",
            "",
        ),
        # A = \{x | x > 1\}
        (
            "{",
            r"\A(?:[A-Z][^={}]{0,30}= ?)?\\?\{ ?[a-z](?: ?\\in[^|:]{1,20})? ?[|:] ?"
            r"([^|{}](?:[^{}]|\{[^{}]*\}){0,200}?) ?\\?\}\Z",
            r"\1",
        ),
        (" to ", r"\A((?!0+ )\d+(?:\.\d+)?) to (\d+(?:\.\d+)?)\Z", r"\1:\2"),
        ("C_", r"(?<![A-Za-z\\])C_\{?(\d+)\}?\^\{?(\d+)\}?", r"C(\1, \2)"),
        ("A_", r"(?<![A-Za-z\\])A_\{?(\d+)\}?\^\{?(\d+)\}?", r"P(\1, \2)"),  # arrangements
        (".", r"(?<![\d.])(\d*\.\d*)\((\d{1,60})\)", r"\1\\overline{\2}"),  # 0.(27)
    )
]

# The words of a condition in cases.
CONDITIONS = (
    (re.compile(r"\\text\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\b(?:if|for|when|where|is)\b|[,.;]\s*(?=&|\\\\|\Z)"), " "),
    (re.compile(r"\b(?:otherwise|else)\b"), "ELSE"),
    (re.compile(r"\beven\b"), "= EVEN"),
    (re.compile(r"\bodd\b"), "= ODD"),
)
CASES = re.compile(
    r"(?:\\begin\s*\{cases\}|\\\{\s*\\begin\s*\{array\}\s*\{[lcr| ]*\})([^&]*&.*)\\end\s*\{(?:cases|array)\}(?:\s*\.)?"
)


def _pairs(cases: re.Match[str]) -> str:
    r"""Return ``1 & n = 1 \\\\ 2 & n > 1`` as a set of pairs: a value and its condition."""
    rows = cases[1]
    for pattern, replacement in CONDITIONS:
        rows = pattern.sub(replacement, rows)
    pairs = [f"({row.replace('&', ',').strip(' ,.;')})" for row in rows.split("\\\\") if row.strip()]
    return rf"\{{{', '.join(pairs)}\}}"


def clean(text: str) -> str:
    """Return the normal form of an answer."""
    return _clean(text) if len(text) <= CACHED_CHARACTERS else _clean.__wrapped__(text)


@lru_cache(maxsize=8192)
def _clean(text: str) -> str:
    text = FEET.sub(r"\1 ft \2 in", in_english(text))
    if "..." in text or "…" in text:
        text = DOTS.sub(r"\1\\ldots", text)
    text = strip_wrappers(text.replace("\0", "") if text.isascii() else _ascii(text))
    if len(text) > MAX_CHARACTERS:
        return text
    if "\\" in text or "$" in text or "~" in text or "{" in text:
        text = DOLLAR.sub(MONEY, text.rstrip("\\ "))
        if "\\\\" in text and "\\begin" not in text:  # doubled escapes; in a matrix they end a row
            text = re.sub(r"\\\\(?=[A-Za-z]{2})", r"\\", text)
        if "quad" in text:
            text = re.sub(r"\\q?quad(?=[a-z])", " ", QUAD.sub(", ", JOINS.sub(r" \1 ", text)))
        text = _rewritten(text, SPELLINGS)
        text = COMMAND.sub(lambda m: COMMANDS.get(m.group(1), m.group()), text)
        money = re.search(r"\$(?!\s?[\d.])", text) is None  # each dollar sign is a currency
        if money or text.count("$") % 2:
            text = re.sub(r"\$(?=\s?[\d.])", MONEY, text, count=0 if money else 1)
        text = (
            INNER_DOLLAR.sub(" ", text)
            .replace("$", "")
            .replace(MONEY, "$")
            .replace("\\%", "%")
            .replace("\\#", "#")
            .replace("\\&", "&&")
        )
    if "\n" in text:
        text = EQUATIONS.sub(", ", text)
    text = re.sub(r"\s+", " ", text).strip()
    text = CASES.sub(_pairs, text)
    text = _without_parenthesis(text.strip())
    text = _rewritten(text, FORMS).strip()
    if integer := INTEGER.search(text):
        text = re.sub(rf"(?<![A-Za-z\\]){integer[1]}(?![A-Za-z])", "k", text[: integer.start()])
    elif (multiple := MULTIPLE.match(text)) and not re.search(r"(?<![A-Za-z\\])k(?![A-Za-z])", text):
        text = re.sub(rf"(?<![A-Za-z\\]){multiple[1]}(?![A-Za-z])", "k", text)
    text = PERCENT.sub("%", text)
    return strip_wrappers(re.sub(r"\s+", " ", text.removeprefix("=")))


def _rewritten(text: str, forms: list[tuple[str, re.Pattern[str], Any]]) -> str:
    for sign, pattern, replacement in forms:
        # For speed: most texts have the signs of a few forms.
        if sign in text:
            text = pattern.sub(replacement, text)
    return text


def _without_parenthesis(text: str) -> str:
    """Remove "(approximately)" behind a number."""
    before, _, inside = text.rpartition(" (")
    return before if PARENTHESIS.fullmatch(inside) and re.search(r"\d", before) else text


def _ascii(text: str) -> str:
    text = VULGAR.sub(lambda m: f"\\frac{{{unicodedata.normalize('NFKC', m.group()).replace('⁄', '}{')}}}", text)
    text = GREEK_UNIT.sub("", text)
    text = re.sub("[⁰¹²³⁴-⁹⁻⁺ⁿ]+", lambda m: "^{" + m.group().translate(SUPERSCRIPT) + "}", text)
    text = re.sub("(?<=[A-Za-z])[₀-₉]+", lambda m: f"_{{{unicodedata.normalize('NFKC', m.group())}}}", text)
    text = re.sub("[㎟-㎦]", lambda m: re.sub(r"(\D+)(\d)", r" \1^\2", unicodedata.normalize("NFKC", m.group())), text)
    text = re.sub(r"√\s*(\d+|[a-z])(?![\d.])", r"\\sqrt{\1}", text.translate({ord("∛"): "\\sqrt[3]"}))
    text = unicodedata.normalize("NFKC", text.translate(TABLE))
    if len(text) > MAX_CHARACTERS:  # NFKC can turn one character into eighteen
        return text
    text = text.translate(TABLE)
    return "".join(str(unicodedata.decimal(c)) if unicodedata.category(c) == "Nd" else c for c in text)
