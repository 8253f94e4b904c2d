r"""What stands beside the last value of a text: what makes it a part of more, its measure, words that change it.

>>> part_of_more(" is ", " apples", "last number"), part_of_more(" is 2", "x", "last number")
(False, True)
>>> measure(" miles per hour on average."), FOLLOWED.match(" million") is not None, FOLLOWED.match(" times.") is None
(' miles per hour', True, True)

Does not find values (sentence.py), and does not look at denials (commit.py).
"""

import re

from grpo_math.grading.commit import DANGER
from grpo_math.grading.equated import MONEY
from grpo_math.grading.units import canonical

INLINE_MATH = re.compile(
    r"\$\$?([^$\n]{1,400})\$\$?|\\\(((?:[^\\]|\\[^()]){1,400}?)\\\)|\\\[((?:[^\\]|\\[^][]){1,400}?)\\\]"
)
_OF_THE_ANSWER = (
    r"\b(?:answer|result|solution|value|number|sum|total|product|true|correct|right|real|actual|first|second|other"
    r"|square|power)\b"
)
COUNTED = (  # "5 times a day", "5 more than Tom": words that leave a number what it is
    r"times(?:\s+(?:an?|per|in|each|every|this|that|to)\s[a-z ]+)?[\s.!]*\Z|over[\s.!]*\Z"
    rf"|(?:more|less|fewer|larger|older) than (?!.*(?:{DANGER.pattern}|{_OF_THE_ANSWER}))"
    r"(?:(?:the|her|his|their|a) )?[A-Za-z]{3,}(?: [A-Za-z]+){0,3}[\s.!]*\Z"
)
LED = re.compile(rf"(?:{DANGER.pattern}|\bpower)\s+(?:of\s+)?[$\\(]*\Z", re.IGNORECASE)
FOLLOWED = re.compile(
    rf"(?:(?:[ -]|\\[ ,;]|\\text\s*\{{)+(?:[A-Za-z]+ ){{0,2}})?(?!{COUNTED})(?:{DANGER.pattern})", re.IGNORECASE
)
SUMMED = re.compile(  # a sum or a product, and its equal sign
    r"[\d)%](?:\s[a-z]+)?\s*(?:[-+*/×÷·−–x]|\\(?:times|cdot|div))"
    rf"\s*[(${MONEY}]*[\d.,]+[\d)%]*(?: [a-z]+)?\s*=[\s${MONEY}]*\Z"
)
AWAY = re.compile(  # words behind its result that do not touch it
    r"(?: [A-Za-z'’]+){0,4}? (for|in|on|after|per|between|from|each|if|when|with|during|over) "
)
OF_WHAT = re.compile(  # "= 7 dollars in 5 days": other numbers behind the result
    r"(?! (?:[a-z]+ )?(?:x|times|of)\b)(?:(?! (?:and|or|but|not|nor|plus|minus|times|is|are|was|which|that|so|about"
    r"|means|meaning|making|leaving|rounds|rounded|approximately)\b) [$A-Za-z'’\d%,]+){1,14}?[\s.]*"
)
MEASURED = re.compile(r"\s{0,3}\\(?:text|mathrm|mbox)\s*\{([^{}]{1,60})\}(?:\^\{?\d\}?)?")
_MEASURE = re.compile(rf"(?<=[\d)}}%]){MEASURED.pattern}(?![\w\\({MONEY}])")
_POWER = re.compile(r"(\s?[A-Za-z]{1,6})(?:\^\s?\{?([23])\}?|[²³])(?!\w)")
_VARIABLE = re.compile(  # "5 x"; the letters of units and "a" are left out, and "P.M."
    r" ?[b-fi-kn-rt-zBDEGHMO-RTUX-Z](?![\w&]|\.[A-Z]|'[^\Ws])"
)
_WORDS = re.compile(r"(?= (?!in\b)(?:[A-Za-z]{2}|[mglLshNWJVK](?![\w'’])))(?: [A-Za-z]{1,20}(?![A-Za-z])){1,4}")
_RUNS_ON = re.compile(
    r"\\[a-z]|\d|[A-Za-z]?[_^]|[A-Z]|[a-rt-z]\b|\s?[+*/=<>^]"
)  # what touches a formula and is more of it
_ODD = re.compile(  # in the prose around a number
    r"\\[A-Za-z]{2,}(?<!pi)(?<!circ)"
    r"|[][{}_~^|<]|(?<![-=])>|#(?!\d)|(?<! )@|(?<![A-Z])(?<![a-z] )&|(?<!\d)(?<!\d )°|\d['’]|!(?=[^\s.!?\"'”’)*$])"
)
_FORMULA_PARTS = re.compile(r"\\(?:d?binom|[dt]?frac|sqrt|angle|cdot|times|log|ln)(?![A-Za-z])(?:\s*\{[^{}]*\}){0,2}")
_DISPLAYED = re.compile(r"\$\$|\\\]|\\end\s*\{[a-z*]+\}")
_OPENED = re.compile(r"\$\$|\\\[|\\begin\b")
FACTOR = re.compile(  # behind a number
    r"\s?(?:\\pi(?![A-Za-z])|\\sqrt\s*(?:\{[^{}]*\}|\d)|\^\s*\{?\s*\\circ\s*\}?|[½¼¾⅐-⅞]|π|√\s?\d+|[²³¹⁰⁴-⁹⁻]+)"
)
_COMMAND = re.compile(
    r"\s*!(?:[ $]*[)\]}=+*/^-]|[ $]+[a-z])|\s*\\(?!text|math|mbox|rm|circ|degree|q?quad|\W)"
)  # and what makes it a part of more
_GLUED = re.compile(  # "5 hours6", "5$6", "5 m'"
    r" ?(?:[A-Za-z]{1,3}[²³½¼π√°^_]|[mghlLNJKVW]['’])"
    r"|[＄$€£]\s{0,2}\d| ?[A-Za-z]+\d| (?:[A-Za-z]+ ){0,2}[A-Za-z]+\((?!e?s\))"
)
_TOUCHES = re.compile(  # what may touch a number from behind: a unit, marks, the end of a formula
    r"(?:\\?%|°[CF]?|[€£¥¢₹]|(?:-|/|\\[ ,;]|~)?[A-Za-z]+(?:[-/][A-Za-z]+)?|\\text\s*\{[^{}]*\})?"
    r"(?:[.,;:!?。，；！？)\]*_\"'”’$]|\\[)\]]|\\end\{[a-z]+\*?\})*(?=\s|\Z|[—–])"
)
_BESIDE = re.compile(r"[\d)}%](?!\.\s)[^\w\n=]*\Z")
_FURTHER = re.compile(r"\.\.\d|[A-Za-z]{3,}\d")  # a number that is glued to what stands before it
_NEGATED = re.compile(rf"\.[-−]\s?\Z|[-−]\s?\([\s${MONEY}]*\Z|\d\s?{MONEY} ?\d+ ?=[\s{MONEY}]*\Z")  # -(5); $18$19 =
_LETTER_BEFORE = re.compile(r"\b[A-J]\W*(?:text\s*\{)?\(?\Z")
_LETTER_BEHIND = re.compile(
    r"\W{0,3}[A-J]\b|[^.!?]*(?:\b[A-J]\b\W*(?:and\b|or\b|but\b|[A-J]\b|\Z)|(?:all|anything|everything) but\b)"
)
_NUMBERED = re.compile(r"\b(?:step|question|problem|exercise|part|case|base)\s*\Z", re.IGNORECASE)  # no value: "Step 6"
_OPERATOR = re.compile(  # before a number, which is then a part of more
    r"(?:=\s*(?:\\left)?[(\[]|\\(?!(?:text|math|mbox|left|q?quad|displaystyle|approx|therefore|implies|iff|to|because"
    r"|so|[Rr]ightarrow|Longrightarrow|longrightarrow|colon|item|par|newline|boxed|fbox|bf|rm)(?![A-Za-z]))[A-Za-z]+"
    rf"|[¬≠≤≥±∓])[\s${MONEY}({{\[]*(?:\\text\s*\{{[\s(]*)?\Z"
)


def part_of_more(before: str, after: str, how: str) -> bool:
    """Do the signs that touch a last value make it a part of a formula, a list or a name?

    >>> part_of_more(" is ", " apples", "last number"), part_of_more(" is 2", "x", "last number")
    (False, True)
    """
    if how == "last choice":
        return any((_LETTER_BEFORE.search(before), _LETTER_BEHIND.match(after), _OPERATOR.search(before)))
    if how == "last formula":
        return _RUNS_ON.match(after) is not None or _TOUCHES.match(after) is None
    if _OPERATOR.search(before) or _NUMBERED.search(before) or _NEGATED.search(before):
        return True
    if _BESIDE.search(before) is not None or _TOUCHES.match(after) is None:
        return True
    if _VARIABLE.match(after) or _GLUED.match(after) or _COMMAND.match(after) or _FURTHER.search(after):
        return True
    beside = before.rstrip(f" $\\({MONEY}")[-1:] + after.lstrip(" $\\)*")[:1]
    whole = not before.strip() and not re.match(r"\s*[+*/^<>=×÷·\d]", after)
    return not whole and re.search(r"[\d+*/^<>×÷·}{&)√∛π²³½]|\\", beside) is not None


def followed(after: str, summed: bool) -> bool:
    """Do words behind a number make it another one? Behind the result of a sum only those that touch it count.

    >>> followed(" million", False), followed(" for the two of them", True), followed(" for the two of them", False)
    (True, False, True)
    """
    measured = MEASURED.match(after)
    away = AWAY.match(after) if summed else None
    near = after if away is None else after[: away.start(1)]
    behind = None if measured is None else FOLLOWED.match(after, measured.end())
    return FOLLOWED.match(near) is not None or behind is not None


def among_formulas(before: str, after: str) -> bool:
    r"""Does LaTeX stand in the prose around a number, as nobody writes it who means the number alone?

    >>> among_formulas("The answer is ", "5."), among_formulas(r"\color{red} ", "5.")
    (False, True)
    """
    if re.search(r"\\(?:neg|lnot|not)(?![A-Za-z])", before) is not None:
        return True
    if _DISPLAYED.search(after) is not None and _OPENED.search(before) is not None:
        return False
    prose = INLINE_MATH.sub(")", _DISPLAYED.split(before)[-1] + after)
    return _ODD.search(_FORMULA_PARTS.sub(" ", _MEASURE.sub(" ", prose))) is not None


def power(after: str) -> str:
    """A unit with an exponent behind a number.

    >>> power(" cm^2 in all"), power(" m²."), power(" x^2"), power(" cm")
    (' cm^2', ' m²', '', '')
    """
    found = _POWER.match(after)
    known = found is not None and canonical(found[1].strip(), found[2] or "") is not None
    return found.group() if found is not None and known else ""


def measure(after: str) -> str:
    """The words behind a number that are its measure; a noun is none, which may be another one in the gold.

    >>> measure(" miles per hour on average."), measure(" apples in total."), measure(" in total.")
    (' miles per hour', '', '')
    """
    words = _WORDS.match(after)
    run = words.group() if words is not None else ""
    if canonical(run.removesuffix(" in")) is not None:  # "7 dollars in 5 days"
        run = run.removesuffix(" in")
    while run:
        unit = canonical(run)
        if unit is not None and not unit.startswith("#"):
            return run
        run = run.rpartition(" ")[0]
    return ""
