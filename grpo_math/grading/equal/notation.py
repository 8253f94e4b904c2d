r"""The notation of expressions: functions, Greek letters, words, and the patterns of numbers, subscripts and matrices.

>>> NUMBER.match("1,200.5").group(), BASED.match("101_{2}").groups()
('1,200.5', ('101', '2', None))
"""

import re

from grpo_math.grading.equal.tree import INFINITE, PI
from grpo_math.grading.lexicon import DECIMAL, GROUPED

DIGITS = frozenset("0123456789")
ASCII_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


FUNCTIONS = frozenset(
    """
arcsin arccos arctan arccot arcsec arccsc arcsinh arccosh arctanh arccoth arcsech arccsch
sinh cosh tanh csch sech coth cosec
sin cos tan cot sec csc log ln lg exp sqrt abs gcd lcm
max min floor ceil
""".split()  # noqa: SIM905
)
ALIASES = {"lg": "log", "tg": "tan", "ctg": "cot"} | {
    name.replace("arc", short): name for name in FUNCTIONS if name.startswith("arc") for short in ("a", "ar")
}
WORDS = {"pi": PI, "infinity": INFINITE, "inf": INFINITE, "infty": INFINITE}
SHORT_WORDS = frozenset(
    """
all am an and any are as at be but by can did etc few for from had has he her his how if in is isn it its left
may me my no nor not now odd of off old on one or our out per she six so sum ten the to too two up us via was
way we who why yes yet
""".split()  # noqa: SIM905
)  # longer words are never read as factors
NOT_FACTORS = ("\\cup", "\\cap", "\\pm", "\\mp", "\\ne", "\\in", "\\approx", "\\equiv", "\\}", "\\{", "\\\\", "\\end",
               "\\text", "\\setminus", "\\to", "\\mod", "\\pmod", "\\bmod", "\\ldots", "\\cdots", "\\dots",
               "\\rfloor", "\\rceil", "\\subset", "\\supset", "\\subseteq", "\\supseteq")  # fmt: skip
# These end an argument without brackets. An opening bracket mostly does, too.
NEXT = ("\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc", "\\ln", "\\log",
        "sin", "cos", "tan", "cot", "sec", "csc", "ln", "log")  # fmt: skip
SIGNS = {"\\ne": "!=", "==": "=", "\\in": "in", "\\approx": "~", "\\equiv": "="}  # by how they are written
PLUS = ("+", "-", "\\pm", "\\mp")
RELATIONS = ("<=", ">=", "!=", "==", "<", ">", "=", "\\ne", "\\in", "\\approx", "\\equiv",
             "\\subset", "\\supset", "\\subseteq", "\\supseteq")  # fmt: skip
GREEK = frozenset(
    """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau
upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar
""".split()  # noqa: SIM905
)
NUMBER = re.compile(
    r"(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?![\d ]*\d)(?! ?/)|\d+(?:_\d{3})*(?!\d*_))(?:\.\d+)?"
    r"|\.\d+|\d+"
)
THOUSANDS = re.compile(rf" *{GROUPED} *")
PLAIN = re.compile(rf"{DECIMAL}|\.\d+")
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*(?:\{(\d+)\}|(\d))")
EXPONENT = re.compile(r"[eE]([-+]?\d{1,5})(?![\w.])")
MIXED = re.compile(
    r" ?\\frac\s*(?:\{\s*(\d{1,9})\s*\}|(\d))\s*(?:\{\s*(\d{1,9})\s*\}|(\d))| (\d{1,9}) ?/ ?(\d{1,9})(?![\d.])"
)
BASED = re.compile(r"([0-9A-Z]+)\s*_\s*(?:\{\s*(?:\\text\s*\{)?\s*\(?(\d{1,2})\)?\s*\}{1,2}|(\d{1,2})(?!\d))")
LETTERS = re.compile(r"[A-Za-z]+")
COMMAND = re.compile(r"\\([A-Za-z]+)")
CHOOSING = re.compile(r"\(\s*\d+\s*,\s*\d+\s*\)")
COEFFICIENT_POWER = re.compile(rf"{DECIMAL} ?\^")  # n2^{n-1}
SUBSCRIPT = re.compile(
    r"_(?:\{(?![^}]*\b(?:and|or|not|is|never)\b)"
    r"([A-Za-z0-9,.+\-]{1,20}|[A-Za-z ]{1,20}|[A-Za-z0-9]+ ?[,+-] ?[A-Za-z0-9]+)\}|([A-Za-z0-9]))"
)
# English words of numbers. The grader reads none as a number, but scales behind digits, as in "3 million".
SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NUMBER_WORDS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred
"""
NUMBER_WORDS = frozenset((*_NUMBER_WORDS.split(), *SCALES))
_FRACTION_WORDS = """
half halve third quarter fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth
sixteenth seventeenth eighteenth nineteenth twentieth hundredth thousandth
"""
FRACTION_WORDS = frozenset(word + plural for word in _FRACTION_WORDS.split() for plural in ("", "s"))
SCALE = re.compile(rf" {{0,2}}({'|'.join(SCALES)}|hundred)s?\b")
MATRIX = re.compile(r"\\begin\s*\{([pbvBV]?matrix|array|smallmatrix)\}\s*(?:\{[clr| ]*\})?")
