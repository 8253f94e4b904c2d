r"""Does a box stand alone, or is it a part of more: of a formula, a chain of equalities, a number that goes on?

It stands alone where nothing, words or a sign such as ``=`` lead up to it, and where its formula ends behind it, with a
unit, a base or a modulus, or goes on with an equation that has letters in it. Anything else is read with it.

>>> part_of_more("x = ", "5", r"\text{ cm}$."), part_of_more(r"$3\cdot", "5", "$.")
(None, '3\\cdot 5')

Does not find boxes (extract.py), and does not look at denials and other answers (commit.py).
"""

import re

from grpo_math.grading.commit import AFTERWARDS, BESIDE, DANGER
from grpo_math.grading.spelled import CARDINALS

# ---------------------------------------------------------------------------------------------------- in front of a box

_OPENED = re.compile(  # a formula, a line, a sentence
    r"(?<!\\)\$\$?|\\[\[(]|\\begin\s*\{[a-z]+\*?\}|(?=\n)|\\\\|(?<=[.!?])\s"
)
_BULLET = re.compile(r"\n\s*(?:[-*+>#|]{1,6}(?=[\s*])|\(?(?:[a-z]|[ivx]{2,4}|\d{1,2})[.)])?\s*\Z")
_LED_UP = re.compile(  # by nothing, a relation, punctuation, or words
    r"(?:\A|[=≤≥≈≡:&~,;.$\"'“‘—–]|(?<![\w)}*])\*{1,3}|(?<![\w)}])__?|(?<![\w)}\\])[(\[]|\s\|\s|[-=]>|<\w+>"
    r"|(?<![\\A-Za-z])[A-Za-z]{2,}|['’]s|[Aa]\s|[A-Za-z]{2} [-–]\s"
    r"|\\(?:equiv|in|approx|sim|geq?|geqslant|leq?|leqslant|to|implies|iff|therefore|because|displaystyle|q?quad"
    r"|[A-Za-z]*arrow|colon|approxeq|cong|triangleq|noindent|hfill|[lL]arge|LARGE|[hH]uge|bf|rm|[$])"
    r"|\\(?:text|mbox|math|stackrel|overset|color|hspace)[^\\$]*\}|\\renewcommand\{[^{}]*\}\{[^{}]*\}"
    r"|(?:\\(?:text|math|under)[a-z]*|\\color\s*\{\w+\}|arrow|(?<![\w)}\\^_]))\s*\{"
    r"|[⇒→∈∴]|[^\x00-\u20ff\u2200-\u24ff\u2776-\u2797\uff00-\uffef\U0001d400-\U0001d7ff])(?:\s|\\[ ,;:!])*\Z"
)
_CHANGED = re.compile(  # words in front of a number that make it another one
    rf"(?:\b(?:{CARDINALS})"
    r"|\b(?:minus|negative|plus|times|half|twice|double|triple|divided by|unlike|without|nearly|almost)"
    r"(?: of)?|\b(?:square|cube)d? (?:roots? )?of|\b(?:opposite|reciprocal|inverse|factorial) of"
    r"|\b(?:less|more|greater|fewer) than)(?: the)?\s*\}?\s*[$\\(]*\Z|[(\[][^()\[\]]{0,40},\s*\Z",
    re.IGNORECASE,
)

# --------------------------------------------------------------------------------------------------------- behind a box

_SCALES = (
    r"(?:hundred|thousand|[mb]illion|trillion|dozens?|hal(?:f|ves)|thirds|squared|cubed|factorial|negative"
    r"|and (?:an? )?(?:half|third|quarter|twice|double)|less(?=\s*[-\d$\\^({])|point|plus|minus|times (?:two|three)"
    r"|(?:in)?correct|wrong)\b"
)
_TOUCHED = (
    r"[#&~;]?\d|(?-i:[A-J])\s?(?:,|/|and\b|or\b|\\text)|:[(\d]|[A-Za-z]{1,2}\d|(?-i:[b-fi-kn-rt-zBDEGHMO-RTUX-Z](?![\w'.]))"
    r"|[!^*/+<>|=({\[-](?!\\?circ|\{\\?circ|\{?\\prime|\(?(?:[A-Za-z ][A-Za-z]|[aAI] )|(?<=<)[/|][a-z]"
    r"|(?<=\*)\*+(?!\w))"
)
_BEHIND = re.compile(
    rf"(?:\\\)|\$|\}})*{_TOUCHED}|[\s$]{{0,3}}(?:\\(?:text|mathrm|mbox)\s*\{{|\\[ ,;])?\s{{0,3}}{_SCALES}"
    rf"|[\s$]{{0,3}}(?:not|{CARDINALS})[\s.!$]*(?:\n|\Z)",
    re.IGNORECASE,
)
_CLOSES = re.compile(  # what ends a formula, or is not seen
    r"(?:[\s.,;:!?*~&\"'`|>)\]}$]|\\[ ,;:!)\]\\]|\\end\s*\{[^{}]*\}"
    r"|\\(?:q?quad|right|par|newline|hline|square|Box|blacksquare|qed|checkmark)(?![A-Za-z])"
    r"|\\f?box(?:ed)?\s*\{\s*\}|\\renewcommand\{[^{}]*\}\{[^{}]*\})*"
)
_MEASURE = re.compile(  # a unit, a base, a modulus
    r"(?:\\?%|°|\^\s*\{?\s*\\circ\s*\}?|_\s*\{?\w{1,2}\}?|\\?\(?p?mod(?![a-z])\s*(?:\{[^{}]*\}|\w+)"
    r"|\\d?frac\s*\{\\text\s*\{[a-z ]*\}\}\s*\{\\text\s*\{[a-z ]*\}\}|(?<=&)\s*\\text\s*\{[\w ,.]*\}"
    r"|(?:\\(?:text|mbox|math)[a-z]*\s*)?\{(?:\\?[ ,~A-Za-z/.'()-]|\^\{?-?\d\}?)*\}(?:\^\s*\{?\d\}?)?|\\rm\b[ A-Za-z]*"
    r"|\\text\s*\{[\s(]*(?:since|because|where|by)\b[^{}]*\})?"
)
_ANOTHER = re.compile(rf"\([A-J]\)|(?i:\b(?:{CARDINALS})\b)")  # value
_PROSE = re.compile(  # the end of the sentence, words, or another formula
    r"\Z|(?<!\})(?![b-fi-kn-rt-z](?![\w'’.-]|\s*(?:\$|\\[\])]|\\end|\Z))|[A-Za-z]\s*(?:[=<>≤≥]|\\(?:[gl]eq?|neq?|approx|sim|in)\b))[A-Za-z]"
    r"|[(\[#-]|<(?=/?\w+>|\|)"
    r"|[\u2010-\u2031∎\u25a0-\u25ff✓✔✅\u3001-\u303f\u4e00-\u9fff，。：；！？\U0001f300-\U0001faff]"
    r"|/[A-Za-z]{2}|\d+[a-z]*-|(?<=[:,] )\d+ [a-z]{2}|(?<=, )\\\(|(?<=, \$)"
)
_FORMULA = re.compile(r"\$(?![\s$.,:;?]|\\(?:(?:black)?square|Box|qed|checkmark)\b)[^$\n]+\$")
_FORMULA_END = re.compile(r"\$|\\[\])\\]|\\end\b")
_SENTENCE_END = re.compile(r"[.!?](?:\s|\Z)|\n")
_CHAIN = re.compile(r"[\s&]*((?:=|\\approx|\\equiv)[^$\n&]*?)[.,\s]*(?:\$|\\[\])\\]|\\end\b|\Z)")
_NAMED = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])|\\triangle|\\equiv|=\s*0\Z")  # cannot contradict a number


def part_of_more(before: str, held: str, after: str) -> str | None:
    r"""All of what a box is a part of, by what touches it or multiplies it; None where it stands alone.

    >>> part_of_more("x = ", "5", "."), part_of_more("x = ", "5", r" million."), part_of_more("$x = -", "5", "$.")
    (None, '5 million', 'x = - 5')
    >>> part_of_more("", "5", " = 6$"), part_of_more("", "5", " = x$"), part_of_more("", "3", r"\text{ over }4$. So")
    ('5 = 6', None, '3\\text{ over }4$')
    """
    led, behind = _OPENED.split(f"\n{before}")[-1], after[:AFTERWARDS]
    sentence = _SENTENCE_END.split(behind, maxsplit=1)[0]
    touched = _FORMULA.match(behind) is not None and before.rpartition("\n")[2].count("$") % 2 == 0
    alone = _BULLET.match(led) or _LED_UP.search(led) or led.rstrip().endswith(held)
    if not alone or _CHANGED.search(before[-BESIDE:]):
        return f"{led.strip()} {held}{_FORMULA_END.split(sentence, maxsplit=1)[0]}"
    chain = _CHAIN.match(sentence)
    if chain is not None:
        return f"{held} {chain[1]}" if _NAMED.search(chain[1]) is None else None
    within = sentence.partition("$")[0] if before.rpartition("\n")[2].count("$") % 2 else ""  # of the same formula
    within = re.sub(r"\\text\s*\{[^{}]*\}", " ", within)
    more = touched or _BEHIND.match(behind) or DANGER.match(behind) or _ANOTHER.search(within) or not _ends(sentence)
    return held + sentence if more else None


def _ends(sentence: str) -> bool:
    """Does a formula end where a sentence goes on behind a box?

    >>> _ends(r" \\text{ cm}$ long"), _ends(" + x$")
    (True, False)
    """
    at = 0
    for pattern in (_CLOSES, _MEASURE, _CLOSES):
        at = pattern.match(sentence, at).end()  # type: ignore
    return _PROSE.match(sentence, at) is not None
