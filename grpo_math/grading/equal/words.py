r"""Answers that are not expressions: choice letters and plain words.

>>> same_words("Tuesday", "It is tuesday", compare=None).value, same_words("12", "13", compare=None).value
('equal', 'undecided')

UNDECIDED means that expression.py has to read the texts.
"""

import re
from collections.abc import Callable
from string import ascii_lowercase

from grpo_math.grading.equal.notation import FUNCTIONS, GREEK
from grpo_math.grading.equal.text import strip_wrappers
from grpo_math.grading.equal.tree import DIFFERENT, EQUAL, UNDECIDED, Comparison, compared
from grpo_math.grading.lexicon import BRACKETED, CHOICE
from grpo_math.grading.verdict import Verdict

WORD = re.compile(
    r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|(?:is|of|to|in|so|we|he|it|as|at|by|or|on|if|an|my|be)\b)", re.IGNORECASE
)
MONTHS = (
    "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    "|nov(?:ember)?|dec(?:ember)?"
)
Compare = Callable[[str, str], "tuple[Verdict | Comparison, str]"]
LETTER = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?"
    rf"(?:\(\s*({CHOICE})\s*\)|({CHOICE})(?:[).:](?=\s|$|[\d\\$-])|\)(?=[a-z(]))|({CHOICE})(?=$))"
    rf"(?=[\s.:)\d\\$-]|$|(?<!\({CHOICE}\))(?<=\))[a-z(])\s*(.*)",
    re.IGNORECASE,
)
IN_BRACKETS = re.compile(rf"\A({CHOICE}) ?\(([^()]*[A-Za-z]{{2}}[^()]*)\)\Z")  # B (12 cm)
# Behind a choice: what joins or denies it, or a second marked choice. Other text belongs to the option.
_JOINED = (
    rf"(?:or|and|nor|not(?: right| correct| true| \(?{CHOICE}|\W*\Z)|but|is|isn't|maybe|perhaps|etc|to {CHOICE})\b"
    rf"|[,;/&|=<>]|(?!I){CHOICE}\s*(?:[,/&]|\Z)|\\[a-z]+{CHOICE}"
)
_SECOND = rf"(?<![\w(])(?:\(?{CHOICE}\)|{CHOICE}[.:]\s)|\b(?:or|not|except) {BRACKETED}\W*\Z|\ball but\b"
_LETTERS = rf"(?!.*[a-z]{{3}}).*\b(?!I+\b){CHOICE}{{2,}}\W*\Z"  # no option has them alone
BESIDE = re.compile(rf"{_JOINED}|.*?(?:{_SECOND})|{_LETTERS}")
TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
ARTICLE = re.compile(r"^(?:(?:it is|it's|they are|there (?:is|are)|is|are|the|an?|always|on)\s+)+", re.IGNORECASE)
# "Yes, y = 0 is a solution": the clause does not say the opposite.
AFFIRMED = re.compile(r"\W*(?:text\s*\{)?\s*(?:yes|no|true|false)\b", re.IGNORECASE)
YES = re.compile(r"\W*(?:text\{)?(yes|true)\b(?:\W*\Z|(?:\}? ?[,.;:!]| -| \()(?!.*\b(?:no|false|or|not)\b))", re.I)
NO = re.compile(r"\W*(?:text\{)?(no|false)\b(?:\W*\Z|(?:\}? ?[,.;:!]| -| \()(?!.*\b(?:yes|true|or)\b))", re.I)
SAME_WORDS = {
    **{f"no {kind}solution{plural}": "\\emptyset" for kind in ("", "real ", "such ") for plural in ("", "s")},
    **dict.fromkeys(("none", "empty set", "empty", "\\emptyset"), "\\emptyset"),
    **dict.fromkeys(("all real numbers", "all reals", "real numbers", "all real values"), "\\mathbb{R}"),
    **dict.fromkeys(("set of real numbers", "(-\\infty,\\infty)", "(-\\infty,+\\infty)", "\\mathbb{R}"), "\\mathbb{R}"),
    **dict.fromkeys(("dne", "limit does not exist", "undefined limit"), "does not exist"),
    **dict.fromkeys(("infinitely many solutions", "infinite", "infinitely many values"), "infinitely many"),
    **{
        f"quadrant {number}": f"{word} quadrant"
        for number, word in zip(("i", "ii", "iii", "iv"), ("first", "second", "third", "fourth"), strict=True)
    },
    **{f"{noun}{verb}": verb for noun in ("series ", "sequence ", "integral ") for verb in ("converges", "diverges")},
    **{f"{verb}ent{noun}": f"{verb}es" for noun in ("", " series", " integral") for verb in ("converg", "diverg")},
    **dict.fromkeys(("player 1", "first player"), "first player"),
    **dict.fromkeys(("player 2", "second player"), "second player"),
}
# Three patterns for a statement, because an answer may name the predicate alone, and a gold answer may not: "Bob is
# first" is not "Alice is first". In both, "the function is odd" is an odd function, and "the triangle is a right
# triangle" is a right triangle.
ONE_WORD_PREDICATE = re.compile(r"\A([a-z]+) (?:is|are) (?!an? |not |no )([a-z]+)\Z")
PREDICATE = re.compile(r"\A[a-z]+ is an? (?!.*\b(?:or|not)\b)(.+)\Z")
# In an answer, "The next bead is blue" is blue, and "it is an even number" is even.
STATEMENT = re.compile(
    r"(?!.*\b(?:not|no|none|neither|nor|never|nothing|false|whether|if|may|might)\b)(?:the |there )?"
    r"(?:(?:[\w'’]+ ){1,3}(?:is|are|will be) )?(?:the |an? |on )?([a-z]{3,})"
    r"(?: (?:numbers?|functions?|triangles?|angles?|integers?|sequences?|series|matrix|events?|quadrilateral))?",
    re.IGNORECASE,
)
WINS = re.compile(r"(?<=[a-z]{4}) (?:wins?|will win|has a winning strategy)\Z")
MARKS = re.compile(rf"{CHOICE}{{2,}}|[\ue000-\ue01f]+")  # several choices, or circled digits
SEPARATORS = re.compile(r"\\[{}]|[{}\s,;.]|\band\b|和|与")
SHORT_WORDS = {"yes", "no", "odd", "even", "true", "all", "none", "may"}
BEYOND = re.compile(  # notation that our grammar cannot read and Math-Verify can
    r"\\(?:sum|prod|i*nt|oint|lim(?:sup|inf)?|det|over|choose|setminus"
    r"|begin\s*\{[pb]matrix\})(?![A-Za-z])|\\\{[^{}]*(?:\\mid|[|:])"
)
FORMULA_COMMANDS = (
    "sum prod int iint iiint oint lim limsup liminf det over choose setminus frac dfrac tfrac cfrac binom dbinom "
    "tbinom sqrt cdot times ast div pm mp le leq leqslant ge geq geqslant lt gt in notin mid vert lvert rvert cup cap "
    "to rightarrow left right big Big bigg Bigg bigl bigr Bigl Bigr limits nolimits displaystyle textstyle end pi "
    "infty emptyset varnothing mathbb circ prime partial sup bmod pmod mod equiv lfloor rfloor lceil rceil"
)
COMMANDS = frozenset((*FORMULA_COMMANDS.split(), *FUNCTIONS, *GREEK))
FORMULA = re.compile(  # tokens of one formula: no text, no fonts, no invisible parts, no list of answers
    rf"\\(?:(?:{'|'.join(sorted(COMMANDS))})(?![A-Za-z])|begin\s*\{{[a-z]*matrix|[^A-Za-z])|[^\\$%;\"`~\n]"
)
SEVERAL = re.compile(  # signs that join or end formulas; a value next to a set is not a product
    r"\A(?:[_^]|\.\.)|\d\s*_|matrix\}\s*\^\s*\{?\s*\\circ|_\s*\{[^{}]*\\begin|[$;\"'`~\n]|(?<!\\)\\[][()]|\\begin\s*\{(?:array|cases)|\\(?:q?quad|neq?|lor|land|vee|wedge|approx|sim|hat|infty\s*(?=[\\\d]))(?![A-Za-z])|\\\}\s*(?=[\w(^]|\\(?:[dt]?frac|begin|sqrt|left|\{))"
    r"|(?:[\d)}^*/]|\\(?:sqrt|div|cdot)|(?<![\\A-Za-z])[A-Za-z])\s*\\(?:left\s*\\)?\{"
)
ITS_WORDS = {"matrix", "pmatrix", "bmatrix", "vmatrix", "array", "cases", "infty", "infinity", "and", "or", *FUNCTIONS}


def same_words(gold: str, answer: str, compare: Compare) -> Comparison:
    """Compare two cleaned texts as choices or words. The first reading that fits the gold answer decides.

    The result is undecided if the gold answer is something else. ``compare`` compares the texts of choices, as in
    "(B) 12".
    """
    plain_gold, plain_answer = _plain(gold), _plain(answer)
    choice = _choice(plain_gold)
    if choice is not None and choice[0].isupper():
        return _same_choice(plain_gold, plain_answer, choice, compare)
    if (same_marks := _same_marks(plain_gold, plain_answer)) is not None:
        return same_marks
    same = _same_statement(plain_gold, plain_answer)
    if TEXT.fullmatch(gold) and plain_gold.isalpha() and plain_answer.isalpha() and len(plain_gold) > 1:
        return compared(same or plain_gold.lower() == ARTICLE.sub("", plain_answer.lower()))
    return EQUAL if same else UNDECIDED


def _same_choice(gold: str, answer: str, choice: tuple[str, str], compare: Compare) -> Comparison:
    """Compare an answer with one choice, as "B" and "(B) 12": by the letter, then by the text."""
    letter, text = choice
    chosen = _choice(answer)
    if chosen is None and text:
        verdict = compare(text, answer)[0]
        return UNDECIDED if verdict is UNDECIDED else compared(verdict is Verdict.CORRECT)
    if chosen is None:  # B/E times E, A or C = A
        return DIFFERENT if re.search(r"\w\W+\w" if gold[0] == "(" else r"\bor\b", answer) else UNDECIDED
    if chosen[0].upper() != letter or (not text and BESIDE.match(chosen[1])):
        return DIFFERENT
    if gold == f"({letter})" and re.match(r"\(\w\)[\d-]", answer):
        return DIFFERENT
    return compared(not text or not chosen[1] or compare(text, chosen[1])[0] is not Verdict.WRONG)


def _same_marks(gold: str, answer: str) -> Comparison | None:
    """Compare several choices, or circled digits in any order. None for another gold answer."""
    marks, marked = SEPARATORS.sub("", gold), SEPARATORS.sub("", answer)
    if not MARKS.fullmatch(marks) or list(marks) != sorted(set(marks)) or (marks != marked and marks[0] <= "\ue000"):
        return None
    return compared(marks == "".join(sorted(marked)))


def _same_statement(gold: str, answer: str) -> bool:
    """Return True for the same words, also if the answer is a sentence with them: "it is tuesday"."""
    statement = STATEMENT.fullmatch(answer)
    predicate = statement[1] if statement else ""
    without_and = {text.replace(", and ", " and ").replace(" and ", ", ") for text in (gold, answer)}
    is_predicate = statement is not None and predicate.lower() == gold.lower()
    return is_predicate or len(without_and) == 1 or _words(gold) in {_words(answer), _words(predicate)} - {""}


def _plain(text: str) -> str:
    return IN_BRACKETS.sub(r"(\1) \2", re.sub(r"\s+", " ", TEXT.sub(r" \1 ", text)).strip(" ."))


def _choice(text: str) -> tuple[str, str] | None:
    """Return the letter of a multiple-choice answer and the text after it."""
    match = LETTER.fullmatch(text) if len(text) < 400 else None
    return None if match is None else (match[1] or match[2] or match[3], match[4].strip())


def _words(text: str) -> str:
    """Return a text of words, or a set that words can name, in a normal form, or "" for other mathematics."""
    if YES.match(text) or NO.match(text):
        return "yes" if YES.match(text) else "no"
    if len(text) > 2000 or not re.fullmatch(r"[A-Za-z][A-Za-z' .,\-]*1?2?", text):
        return SAME_WORDS.get(text.replace(" ", ""), "")
    words = ARTICLE.sub("", re.sub(r"\s+", " ", text).strip(" .,").lower())
    words = PREDICATE.sub(r"\1", ONE_WORD_PREDICATE.sub(r"\2 \1", words))
    words = ", ".join(sorted(re.split(r",? and |, ", SAME_WORDS.get(words, WINS.sub("", words)))))
    return words if len(words) > 3 or words in SHORT_WORDS else ""


def several(text: str) -> set[str]:
    r"""Return the signs that show that a text contains more than one formula.

    >>> several(r"$1$2$ \lor 3") == {"$", r"\lor"}, several(r"\{1, 2\} \cup \{3\}")
    (True, set())
    """
    return {mark.strip() for mark in SEVERAL.findall(strip_wrappers(text))}


def for_math_verify(text: str) -> bool:
    r"""Return True if only Math-Verify can read a text: it has such notation, and no words.

    The notation is sums, integrals, limits and sets in builder notation. Other texts are not given to Math-Verify: they
    can take seconds, and it accepts the last member of a chain of equalities.

    >>> for_math_verify(r"\sum_{i=1}^{9} i"), for_math_verify("not 6"), for_math_verify(r"not \sum_{i=1}^{3} i")
    (True, False, False)
    """
    return beyond(text) and pure(text)


def beyond(text: str) -> bool:
    """Return True if a text contains notation that our grammar cannot read."""
    return BEYOND.search(text) is not None


def pure(text: str) -> bool:
    """Return True if a text is one formula without words."""
    if text.count("=") > text.count("_{") + 1 or text.count("\\{") != text.count("\\}"):  # a set that is never closed
        return False
    if FORMULA.sub("", text) or SEVERAL.search(text) is not None or re.search(r"\?|[\])\d]\s*\\\{", text) is not None:
        return False
    return all(word.lower() in ITS_WORDS or word in ascii_lowercase for word in WORD.findall(text))  # ijk, xyz
