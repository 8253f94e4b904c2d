r"""LaTeX formulas within a text -> MathML that is safe to put into a page.

latex2mathml does not escape its output. The output is therefore parsed as XML, and only known elements and attributes
of MathML remain. A formula that cannot be converted stays text.

>>> mathml(r"\text{<img/src=x/onerror=alert(1)>}") is None
True

The page's template escapes the text around a formula.
"""

import re
from collections.abc import Iterator
from xml.etree import ElementTree

from markupsafe import Markup

from grpo_math.errors import escaped

LONGEST = 2000  # characters of a formula
MOST_IN_A_TEXT = 200
BLOCKS = ("block", "double", "table")
MOST_IN_A_PAGE = 20_000  # different formulas, at about 0.3 ms each
NAMESPACE = "{http://www.w3.org/1998/Math/MathML}"
ELEMENTS = {
    *("math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "mstyle", "mpadded", "mphantom", "menclose"),
    *("mfrac", "msqrt", "mroot", "msub", "msup", "msubsup", "munder", "mover", "munderover", "mtable", "mtr", "mtd"),
}
ATTRIBUTES = {
    *("display", "displaystyle", "scriptlevel", "mathvariant", "linethickness", "width", "lspace", "rspace"),
    *("stretchy", "fence", "form", "accent", "accentunder", "largeop", "movablelimits", "separator", "columnalign"),
}
VALUE = re.compile(r"[a-z-]+|-?[0-3]?(\.\d+)?(em|pt|px)?")  # nothing wide enough to cover another text
TABLES = "(?:aligned|align|alignedat|array|cases|equation|gathered|gather|[bBpvV]?matrix|smallmatrix|split)"
# A regular expression cannot count braces, so this one is written out for four levels of them.
BRACES = r"\{(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*\}"
# The search is linear: the opening mark of a formula does not occur in it again, and an escaped dollar, which the last
# alternative skips, opens none. Otherwise each of many marks would scan the same text.
LENGTH = rf"{{1,{LONGEST}}}?"
# A digit after the second dollar means prices, as in "$5 or $6". \7 is the name of the environment: a new group
# before it changes its number.
FORMULA = re.compile(
    rf"\\\((?P<inline>(?:(?!\\\().){LENGTH})\\\)|\\\[(?P<block>(?:(?!\\\[).){LENGTH})\\\]|\$\$(?P<double>.{LENGTH})\$\$"
    rf"|\$(?P<single>(?:\\.|[^\\$]){LENGTH})\$(?!\d)|(?P<boxed>\\boxed\s*{BRACES})"
    rf"|(?P<table>\\begin\{{({TABLES}\*?)\}}(?:(?!\\begin\{{\7\}}).){LENGTH}\\end\{{\7\}})|(?<!\\)(?:\\\\)*\\\$",
    re.DOTALL,
)
WORDS = re.compile(r"\\(?:text\w*|mbox|mathrm|operatorname)\s*\{[^}]*\}|\\[a-zA-Z]+")


class Formulas:
    """The different formulas of a page, each converted once.

    >>> formulas = Formulas()
    >>> list(formulas.split(r"It is \\(x\\), not $5 or $6."))
    [('It is ', None), ('\\\\(x\\\\)', 0), (', not $5 or $6.', None)]
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], int | None] = {}
        self.markup: list[Markup] = []

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Yield the pieces of a text. A formula has its number in ``markup``, other pieces have None."""
        text = escaped(text, keep="\r\n\t")
        start = done = count = 0
        while count < MOST_IN_A_TEXT and (match := FORMULA.search(text, start)):
            kind = match.lastgroup or ""
            is_text = not kind or (kind == "single" and _is_money(match[kind]))
            number = None if is_text else self._number(match[kind], "block" if kind in BLOCKS else "inline")
            # The closing dollar of a rejected match may open a formula, so the search continues inside the match.
            start = match.start() + 1 if kind else match.end()
            # Rejected formulas count too: nested tables would be converted from each of their beginnings.
            count += not is_text
            if number is not None:
                yield text[done : match.start()], None
                yield match[0], number
                start = done = match.end()
        yield text[done:], None

    def _number(self, latex: str, display: str) -> int | None:
        if (latex, display) not in self._known:
            converted = mathml(latex, display) if len(self.markup) < MOST_IN_A_PAGE else None
            self._known[latex, display] = len(self.markup) if converted else None
            self.markup += [converted] if converted else []
        return self._known[latex, display]


def mathml(latex: str, display: str = "inline") -> Markup | None:
    """Return a formula as MathML, or None if it cannot be converted, is too long, or contains anything else."""
    from latex2mathml.converter import convert

    if len(latex) > LONGEST:
        return None
    try:
        tree = ElementTree.fromstring(convert(latex, display=display))
        for element in tree.iter():
            _restrict(element)
        return Markup(ElementTree.tostring(tree, encoding="unicode"))
    except Exception:
        # The formula is hostile text: the library raises many kinds, and deep nesting raises a RecursionError.
        return None


def _restrict(element: ElementTree.Element) -> None:
    """Remove the unknown attributes of an element. Raise `ValueError` for an unknown element."""
    namespace, tag = element.tag[: len(NAMESPACE)], element.tag[len(NAMESPACE) :]
    if namespace != NAMESPACE or tag not in ELEMENTS:
        raise ValueError(element.tag)
    boxed = tag == "menclose" and element.get("notation") == "box"
    attributes = {name: value for name, value in element.items() if name in ATTRIBUTES and VALUE.fullmatch(value)}
    element.attrib.clear()
    # The new tag has no namespace: ElementTree would write <ns0:mrow>, which is not MathML to an HTML parser.
    # Chromium has no <menclose>: the box is drawn by page.css.
    element.tag = "mrow" if tag == "menclose" else tag
    element.attrib.update({"class": "boxed"} if boxed else attributes)


def _is_money(text: str) -> bool:
    """Return True if the text between two dollars is prose about money, as in "$5 a day and $".

    >>> [_is_money(text) for text in ("5 a day and ", "x = 5", " 6 at night", "x")]
    [True, False, True, False]
    """
    bare = WORDS.sub("0", text)
    if re.search(r"\n\s*\n|<<|(?<![a-z])[a-z]{2,}\s+[a-z]|\d\s+[a-z]{3,}|[=+*/(-]\s*$|^\s*[.,]\s*\D", bare):
        return True
    is_math = re.search(r"[\\^_{}]|^\s*[a-zA-Z]+\s*$|^\s*[^\s\d].*=", text)
    return text != text.strip() and not is_math
