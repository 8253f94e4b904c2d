r"""The kinds of faults of a single row: a table of a name, a test, a remedy, and whether the row is left out.

>>> rows = [{"problem": "What is 3 + 4?", "answer": text} for text in ("7", "the second", "cm", "5 or 7")]
>>> [fault.check for row in rows for fault in faults(row, habits(rows))]
['gold answers that are a unit only', 'gold answers with several answers']
>>> [fault.check for fault in faults({"problem": r"Find $\sqrt{8$. It is \boxed{7}.", "answer": "7"}, habits(rows))]
['problems that contain their answer', 'open LaTeX']

row_words.yaml has the words that the tests need.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from grpo_math.checks.golds import DAMAGED, INTEGER, is_damaged, is_own_text, words
from grpo_math.errors import Finding, escaped
from grpo_math.grading.equal.units import measure
from grpo_math.grading.where import find
from grpo_math.problems.contamination import whole
from grpo_math.system.yaml_files import read_yaml

# A line of patterns per language.
WORDS = {
    name: "|".join(text.split("\n")[:-1])
    for name, text in read_yaml(Path(__file__).with_name("row_words.yaml")).items()
}

SHOWN = 80  # characters of an example
PROSE, SENTENCE_WORDS = 5, 3  # words of a gold answer that nobody can match, and of one with a full stop
COMMON = 0.05  # of the problems have a common word
JUDGED = 6  # words of a problem whose language is judged
SCRIPT_LETTERS, FEWEST = 12, 4  # letters that tell the script: Latin or Greek, and another one
MANY = 100  # problems whose words tell the language of a file
SHARED = 0.3  # of the words of a usual problem are common
FOREIGN = 0.2  # of the usual share of common words

WRAPPED = re.compile(r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}|[$~]")
PROOF = re.compile(
    r"\b(?:proofs?|prove[dns]?|q\.?e\.?d|as (?:required|desired)|to be shown|(?:is|have) shown)\b"
    r"|\\(?:blacksquare|square|Box|qed)|∎|证明",
    re.IGNORECASE,
)
NO_GOLD = re.compile(rf"[\s\-.?_]*+(?:(?:{WORDS['no_gold']})[\s\-.?_]*)?", re.IGNORECASE)
SEVERAL = re.compile(
    r"\S\s*(?:\bor\b|(?<!\\);)\s*\S"
    r"|(?:^|\s)\(?(?:a|1|i)\)\s.*\s\(?(?:b|2|ii)\)\s|\brespectively\b",
    re.DOTALL | re.IGNORECASE,
)
EQUATIONS = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?\s*=[^=]+\b(?:and|,)\s*[A-Za-z](?:_\{?\w+\}?)?\s*=")
LETTER = re.compile(
    r"(?i:(?:the )?(?:correct )?(?:option|choice|answer)(?: is)?\s*)?\(?[A-H]\)?[.:]?|\(?[A-H]\)\s*\S.*"
    r"|[^\d①-⑩]*[①-⑩][^①-⑩]*",
    re.DOTALL,
)
# What Python or JavaScript prints for an object that is not text.
CODE = re.compile(
    r"<[^<>]+ (?:at 0x[0-9a-f]+|object)>|<(?:class|function|built-in) .*>|\[object Object\]|[{\[]\s*['\"]\w+['\"]\s*:.*"
    r"|b'.*'|(?:\w+\.)*(?:Fraction|Decimal|Integer|Rational|Float|float\d*|int\d*|array|tensor|Series|Poly)\(.*\)"
    r"|(?:lambda\b|def |print\().*",
    re.DOTALL,
)
DEGREES = re.compile(r"\^?\{?\\(?:circ|degree)\}?|\\?[%$]?")

# In a problem
DRAWING = re.compile(r"\[asy\](?:(?!\[asy\]).)*?\[/asy\]", re.DOTALL)
CODE_OF_FIGURE = re.compile(r"\[asy\]|\\begin\{(?:tikzpicture|asy|picture|tabular|array)\}|<svg|\|.*\|")
# For speed, the text is in lower case, and a word is tried only at its start.
FIGURE = re.compile(
    rf"!\[[^\]]*\]\(|<img\b|\\includegraphics|<image|\[(?:image|figure|img)[^\]]*\]|\b(?=\w)(?:"
    rf"(?:{WORDS['before']})\s*(?:{WORDS['figures']})(?:\b|(?<=[^\x00-\u2fff]))(?!s| of\b)"
    rf"|(?:{WORDS['alone']})"
    rf"|(?:see|shown in|as in) (?:this|the) (?:{WORDS['drawings']})\b(?! of\b)"
    rf"|(?:{WORDS['figures']}|{WORDS['drawings']})s?,? ?(?:is |are |as )?(?:{WORDS['after']})\b)"
)
# A control character that was a LaTeX command, and UTF-8 that was read in another encoding.
LOST = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffd]|\r(?!\n)"
    r"|\n(?=(?:e|eq|abla|mid|otin|eg)(?![A-Za-z]| ?&))|\^\{?circ(?![a-z])"
    r"|\t(?=ext|imes|heta|frac|riangle|ilde|(?:an|ag|au|o)(?![a-z]))|[ÂÃâ][\x80-¿€]"
)
TASK = re.compile(rf"(?:please |bitte |\W|[a-z\d]{{1,2}}[.)])*(?:{WORDS['tasks']})(?![a-z])", re.IGNORECASE)
SENTENCE = re.compile(r"(?<=[.?!])\s+|(?<=[。？！])|\n")
ASKS = re.compile(r"(?<![?？؟])[?？؟]++(?=[^\w\s?？؟]*+(?:\s|\Z)|[^\x00-\u2fff])")
ESCAPED = re.compile(r"\\(?:\\|[{}$])")
PAIRS = (
    (r"\{", r"\}"),
    (r"\\left(?![a-z])", r"\\right(?![a-z])"),
    (r"\\begin\b", r"\\end\b"),
    (r"\\\[", r"\\\]"),
    (r"\\\(", r"\\\)"),
)
MONEY = re.compile(r"\$ ?\.?\d[\d,.]*(?![\d.,]|[A-Za-z]?[\^+*=(]| ?[-+*/=^<>] ?\d)|\d ?\$(?![\w\\])")
FORMULA = re.compile(
    r"\[asy\](?:(?!\[asy\]).)*?\[/asy\]|\\begin\{(\w+\*?)\}.{0,700}?\\end\{\1\}|\$[^$]*\$"
    r"|\\\[(?:\\\\|(?!\\[\\[]).)*?\\\]|\\\((?:(?!\\\().)*?\\\)|\\[A-Za-z]+",
    re.DOTALL,
)
LETTERS = re.compile(r"[^\W\d_]{2,}")

Row = Mapping[str, Any]


class Habits(NamedTuple):
    """Properties that most rows of a file share. A row that differs is suspicious."""

    script: str
    common: frozenset[str]
    share: float  # of the words of a problem that are common


class Kind(NamedTuple):
    """A kind of fault. ``test`` returns what to show of a row, True for its gold answer, or something false."""

    name: str
    remedy: str
    test: Callable[[Row, Habits], object] = lambda row, usual: None
    left_out: bool = True

    def finding(self, text: object, *words: object) -> Finding:
        """Return a row of this kind as a finding, an error if the row is left out. ``words``: for the name."""
        level = "error" if self.left_out else "warning"
        return Finding(level, str(text), self.remedy, self.name.format(*words))


def habits(rows: Sequence[Row]) -> Habits:
    """Return the habits of a file."""
    texts = [_words(FORMULA.sub(" ", row["problem"])) for row in rows]
    counted = Counter(word for words in texts for word in {*words})
    common = frozenset(word for word, count in counted.items() if count >= max(2, COMMON * len(rows)))
    shares = [_share(words, common) for words in texts if len(words) >= JUDGED]
    scripts = Counter(filter(None, map(_script, texts))).most_common(1)
    share = median(shares) if len(shares) >= MANY else 0.0
    return Habits(scripts[0][0] if scripts else "", common, share)


def faults(row: Row, usual: Habits) -> Iterator[Finding]:
    """Yield each fault of a problem, and the first fault of a gold answer."""
    problem = DRAWING.sub("[asy]", row["problem"])
    row = {**row, "problem": problem, "lower": problem.lower(), "prose": FORMULA.sub(" ", problem)}
    for kinds, most in (
        (() if INTEGER.fullmatch(row["answer"]) else GOLD_KINDS, 1),
        (PROBLEM_KINDS, len(PROBLEM_KINDS)),
    ):
        matches = [(kind, text) for kind in kinds if (text := kind.test(row, usual))]
        for kind, text in matches[:most]:
            yield kind.finding(shown(text if isinstance(text, str) else row["answer"]))


def shown(text: object) -> str:
    return repr(escaped(str(text))[:SHOWN])


# Gold answers


def _plain(row: Row) -> str:
    return WRAPPED.sub(r"\1", row["answer"]).strip()


def _is_unit(row: Row, usual: Habits) -> object:
    plain = _plain(row)
    # One letter may be a variable.
    unit = measure(f"\\text{{{plain}}}" if len(plain) > 1 else plain)
    return (unit and not re.match("(?:an?|the) ", plain, re.IGNORECASE)) or DEGREES.fullmatch(plain)


def _is_prose(row: Row, usual: Habits) -> bool:
    parts = words(row["answer"])
    return len(parts) >= PROSE or (len(parts) >= SENTENCE_WORDS and row["answer"].endswith((".", "!", "。")))


# Problems


def _contains_answer(row: Row, usual: Habits) -> str:
    # Most problems lack a letter or a digit of their answer, and need no search. Signs of other scripts may be equal.
    may_be = not row["lower"].isascii() or {*filter(str.isalnum, row["answer"].casefold())} <= {*row["lower"]}
    answer = find(row["problem"] if may_be else "", only_marked=True)
    is_marked = answer.how != "value" and whole(row["answer"]) in (whole(answer.text), whole(answer.text.rstrip(" )]")))
    return row["problem"][-60:] if is_marked else ""


def _is_open(text: str) -> bool:
    plain = ESCAPED.sub(" ", text) if re.search(r"[\\{}$]", text) else ""
    if plain and any(len(re.findall(one, plain)) != len(re.findall(other, plain)) for one, other in PAIRS):
        return True
    # A dollar sign before a number may be money, unless the text has LaTeX.
    return plain.count("$") % 2 == 1 and ("\\" in plain or bool(MONEY.sub("", plain).count("$")))


def _cannot_be_checked(row: Row, usual: Habits) -> str:
    sentences = [sentence.strip() for sentence in SENTENCE.split(row["problem"])]
    tasks = [sentence for sentence in sentences if TASK.match(sentence)]
    return tasks[0][:60] if tasks and not any(map(ASKS.search, {*sentences} - {*tasks})) else ""


def _other_language(row: Row, usual: Habits) -> str:
    words = _words(row["prose"])
    # A script that does not separate words has no common ones.
    judged = len(words) >= JUDGED and usual.share >= SHARED
    is_other = judged and _share(words, usual.common) < FOREIGN * usual.share
    return row["problem"][:60] if is_other or _script(words) not in ("", usual.script) else ""


def _around(text: str, match: re.Match[str] | None) -> str:
    return text[max(0, match.start() - 20) : match.end() + 40] if match else ""


def _words(prose: str) -> list[str]:
    return LETTERS.findall(prose.lower())


def _share(words: Sequence[str], common: frozenset[str]) -> float:
    return sum(word in common for word in words) / len(words)


def _script(words: Sequence[str]) -> str:
    """Return the script of most letters of a problem's words, such as LATIN or CJK; "" for a few letters."""
    letters = "".join(words)[:200]
    name = "LATIN" if letters.isascii() else Counter(map(_script_of, letters)).most_common(1)[0][0]
    # Names in formulas are Latin or Greek in each language.
    fewest = SCRIPT_LETTERS if name in ("LATIN", "GREEK") else FEWEST
    return re.sub("HIRAGANA|KATAKANA", "CJK", name if len(letters) >= fewest else "")


@cache
def _script_of(letter: str) -> str:
    return re.split("[ -]", unicodedata.name(letter, ""))[0]


NO_ANSWER = Kind("no gold answer", "add the answers", lambda row, usual: NO_GOLD.fullmatch(_plain(row)))
CHOICES = Kind(
    "multiple-choice letters",
    "ask for the value, because a guess hits a letter, or give --keep_choices",
    lambda row, usual: LETTER.fullmatch(_plain(row)),
)
IN_PROSE = Kind("gold answers in prose, which nobody can match", "write the value alone", _is_prose)
SEVERAL_ANSWERS = Kind(
    "gold answers with several answers",
    "keep one, or ask for all of them",
    lambda row, usual: SEVERAL.search(row["answer"]) or EQUATIONS.search(_plain(row)),
)
IS_DAMAGED = Kind(
    f"gold answers that are {DAMAGED}", "write the answers again", lambda row, usual: is_damaged(row["answer"])
)
BY_TEXT = Kind(
    "gold answers that nobody matches but in the same words",
    "write the value alone",
    lambda row, usual: is_own_text(row["answer"], row["problem"]),
    left_out=False,
)
# The first that is true counts.
GOLD_KINDS = (
    Kind("gold answers that are code objects", "write their values", lambda row, usual: CODE.fullmatch(row["answer"])),
    Kind("gold answers that are proofs", "ask for a value", lambda row, usual: PROOF.search(row["answer"])),
    NO_ANSWER,
    CHOICES,
    Kind("gold answers that are a unit only", "add the number", _is_unit),
    SEVERAL_ANSWERS,
    IS_DAMAGED,
    IN_PROSE,
    BY_TEXT,
)
# No value that a model answers is correct.
NEVER_CORRECT = {kind.name for kind in GOLD_KINDS} - {CHOICES.name, SEVERAL_ANSWERS.name, IS_DAMAGED.name, BY_TEXT.name}
PROBLEM_KINDS = (
    Kind("problems that contain their answer", "cut the solution off", _contains_answer),
    Kind(
        "problems with a figure that is missing",
        "describe the figure in words",
        lambda row, usual: (
            not CODE_OF_FIGURE.search(row["problem"]) and _around(row["problem"], FIGURE.search(row["lower"]))
        ),
    ),
    Kind(
        "open LaTeX",
        "close the brace or the formula",
        lambda row, usual: next((text[:60] for text in (row["problem"], row["answer"]) if _is_open(text)), ""),
    ),
    Kind(
        "problems with lost characters",
        "read the source again, with its escapes and encoding",
        lambda row, usual: _around(row["problem"], LOST.search(row["problem"])),
    ),
    Kind("tasks whose answer cannot be checked", "ask for a value", _cannot_be_checked),
    Kind(
        "problems in another language than the others",
        "leave them out if you did not want them",
        _other_language,
        False,
    ),
)
# audit.py finds these, by comparing rows with each other, with a test set or with the grader.
UNUSABLE = Kind("rows that cannot be used", "correct them")
LONG = Kind("problems longer than {} tokens", "shorten them, or raise --prompt_tokens")
NOT_CORRECT = Kind("gold answers that are not correct against themselves", "write them as the grader reads them")
CONTRADICTORY = Kind("contradictory gold answers", "keep the right one")
REPEATED = Kind("near-duplicate problems", "keep one")
IN_A_TEST = Kind("problems of {}, a test set", "leave them out, or the accuracy on the set means nothing")
NOT_BARE = Kind("gold answers that are not correct against their number", "write the number as the grader reads it")
OWN_TEXT = Kind(
    "gold answers that are correct only in their own text",
    "--bare_numbers writes their numbers in a column",
    left_out=False,
)
