"""Answer formats: the formats that a prompt can ask for, and a check that a completion keeps to one.

where.py finds the answer in a completion, and problems/prompts.py builds prompts.
"""

import math
import re
from dataclasses import dataclass

from grpo_math.errors import require_choice
from grpo_math.grading.equal import units
from grpo_math.grading.equal.clean import clean
from grpo_math.grading.equal.compare import QUICK_CHARACTERS, value
from grpo_math.grading.vocabulary import LANGUAGES, START, whole_words, words


@dataclass(frozen=True)
class AnswerFormat:
    """A format of completions. ``strict`` matches a whole completion; where.py finds the answer.

    ``tags`` are the pieces that partial credit counts, in the required order. ``example`` is a whole completion in the
    format, with ANSWER in place of the answer.
    """

    strict: re.Pattern[str]
    tags: tuple[str, ...]
    example: str


def _in_tags(thought: str) -> AnswerFormat:
    """Return the format of a thought and an answer, each in tags."""
    return AnswerFormat(
        strict=re.compile(
            rf"\s*<{thought}>(?:(?!</?{thought}>|</?answer>).)*</{thought}>\s*"
            r"<answer>(?!\s*</answer>)(?:(?!</?answer>).)+</answer>\s*",
            re.DOTALL,
        ),
        tags=(f"<{thought}>", f"</{thought}>", "<answer>", "</answer>"),
        example=f"<{thought}>\nIt follows.\n</{thought}>\n<answer>\nANSWER\n</answer>\n",
    )


# Each `strict` matches exactly one answer that is not empty: two answers would be two tries. Each pattern is linear: a
# hostile completion finds no nested quantifiers, and no two in a row that match the same spaces.
BOX = r"\\f?box(?:ed)?(?![A-Za-z])"
# A sum or a product of plain numbers, possibly after "x =" or before a unit. It equals the answer, but a policy that
# learns to repeat "What is 24 + 26?" as "#### 24 + 26" has calculated nothing. If the gold answer is known to be one
# number, `in_format_for` refuses every calculation.
_NUMBER = r"[\\({\[$ \t]*-?\d[\d.,]*[\\)}\]$ \t]*"
_SIGN = r"(?:[-+*×·]|\\times|\\cdot|(?=\())"
_CALCULATION = rf"(?:[ \t]*[A-Za-z][ \t]*=)?{_NUMBER}(?:{_SIGN}{_NUMBER})+(?:[A-Za-z]{{2}}[^\n#\d=]*)?(?:\n|\Z)"
_HASHED = rf"####(?!{_CALCULATION})[ \t]*[^\s#][^\n#]*(?:\n\s*)?"
FORMATS: dict[str, AnswerFormat] = {
    "gsm8k": AnswerFormat(
        strict=re.compile("[^#]*" + _HASHED, re.DOTALL), tags=("####",), example="It follows.\n#### ANSWER"
    ),
    "direct": AnswerFormat(strict=re.compile(r"\s*" + _HASHED), tags=("####",), example="#### ANSWER"),
    "boxed": AnswerFormat(
        # A box inside the thinking is not an answer. (?=(..))\1 matches without backtracking. The possessive form is
        # wrong in Python 3.11 before 3.11.5.
        strict=re.compile(
            rf"(?=((?:.*</think>)?))\1(?=((?:(?!{BOX}).)*))\2\\f?boxed[ \t]*\{{(?!\s*\}})"
            rf"(?=((?:(?!{BOX}).)*))(?=\3\Z).*\}}.*",
            re.DOTALL,
        ),
        tags=("\\boxed",),
        example=r"It follows: \boxed{ANSWER}.",
    ),
    # The prompt ends with <think>.
    "r1_zero": AnswerFormat(
        strict=re.compile(
            r"(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?!\s*</answer>)(?:(?!</?answer>).)+</answer>\s*",
            re.DOTALL,
        ),
        tags=("</think>", "<answer>", "</answer>"),
        example="It follows. </think> <answer>ANSWER</answer>",
    ),
    "xml": _in_tags("reasoning"),
    "think": _in_tags("think"),
}


def in_format(completion: str, answer_format: str) -> bool:
    r"""Return True if the whole completion keeps to the format, with exactly one answer.

    >>> in_format("3 + 4 = 7\\n#### 7", "gsm8k"), in_format("It is 7.", "gsm8k")
    (True, False)
    >>> in_format("#### 7", "direct"), in_format("3 + 4 = 7\\n#### 7", "direct")
    (True, False)
    >>> in_format(r"so \boxed{7}", "boxed"), in_format(r"\boxed{7} or \boxed{8}", "boxed")
    (True, False)
    >>> in_format("easy </think> <answer>7</answer>", "r1_zero"), in_format("<answer>7</answer>", "r1_zero")
    (True, False)
    >>> [in_format(f"#### {answer}", "direct") for answer in ("24 + 26", "24 + 26 = 50", "2x + 3", "1/2")]
    [False, True, True, True]
    """
    require_choice("answer_format", answer_format, tuple(FORMATS))
    return FORMATS[answer_format].strict.fullmatch(completion) is not None


ONE_NUMBER_FORMATS = ("gsm8k", "direct")
_LATEX_FRACTION = re.compile(r"\\frac ?(?:\{ ?(\d+) ?\}|(\d)) ?(?:\{ ?(\d+) ?\}|(\d))")
_ONE_NUMBER = re.compile(
    r"[-+]? ?(?:(?:(?:\d{1,3}(?:[, ]\d{3})+|\d+)(?:[.,]\d+)?|\.\d+)|(?:\d+ )?((\d+) ?/ ?(\d+))) ?%?"
)
# An operator or a root: a calculation that is left undone, unless it is a power of ten.
_UNDONE = re.compile(
    r"[\d)}!] ?(?:[-+/÷!]|(?<!10)\^|(?:[*×·]|\\times|\\cdot)(?! ?10 ?\^))|\\(?:sqrt|[dt]?frac|binom|div)|√"
)


def in_format_for(gold: str, completion: str, answer_format: str, answer: str = "", problem: str = "") -> bool:
    r"""Return True if the completion keeps to the format, also with one number if the gold answer is one number.

    A policy that repeats the calculation in a problem has calculated nothing: `ONE_NUMBER_FORMATS` are met by a number
    in digits, and tags by no calculation. Behind a number in these formats and in a box may be a measure, or words of
    the problem. ``gold`` is a bare answer, ``answer`` the answer of the completion.

    >>> [in_format_for("24", f"#### {a}", "gsm8k", a) for a in ("$24", "24 cm", "24 if it rains", "48/2", "x = 24")]
    [True, True, False, False, False]
    >>> in_format_for("24", "#### 24 red apples", "gsm8k", problem="How many red apples are left?")
    True
    >>> in_format_for(r"4\sqrt{3}", r"#### 2\sqrt{12}", "gsm8k", r"2\sqrt{12}")
    True
    """
    if not in_format(completion, answer_format):
        return False
    if answer_format in ONE_NUMBER_FORMATS:
        answer = completion.rpartition("####")[2].strip()
    if answer == gold or answer.isdecimal() or value(gold) is None:
        return True
    if len(answer) > QUICK_CHARACTERS:
        return False
    if answer_format in ONE_NUMBER_FORMATS:
        return is_one_number(answer, gold) and _has_only_a_unit(answer, gold, problem)
    if answer_format == "boxed":
        return _has_only_a_unit(answer, gold, problem)
    return _UNDONE.search(answer) is None or any(is_one_number(member, gold) for member in answer.split("="))


# Words of the problem that may not follow a number: "36 dozen", "36 moitié". English multipliers are never a unit for
# `units.split`.
_FORBIDDEN_WORDS = frozenset(("dozen", "dozens")).union(
    words("is"), words("not"), words("maybe"), words("changes") - {*LANGUAGES["en"]["changes"]}
)
MOST_WORDS = 8  # of a unit: each one is searched in the problem, which takes milliseconds


def _has_only_a_unit(answer: str, gold: str, problem: str = "") -> bool:
    """Return True if the words behind a number are measures or words of the gold answer or of the problem.

    Other words may deny the number, in any language. "Not" and "or" do so, also if the problem has them.

    >>> [_has_only_a_unit(text, "5 apples") for text in ("5 cm^2", "5 apples", "5 is wrong", "5 dozen", "5 人", "5")]
    [True, True, False, False, False, True]
    >>> [_has_only_a_unit(f"5 {words}", "5", "Ann is not sad. How many Äpfel?") for words in ("äpfel", "is not")]
    [True, False]
    """
    plain = clean(answer)
    bare, unit = units.split(plain)
    others = units.other_words(plain[len(bare) :] if unit is not None else re.split(r"\d", plain)[-1])
    others += re.findall("[α-ωάέήίόύώ]{3,}", answer)  # clean() has removed the unit "ευρώ"
    changed = unit is None or not _FORBIDDEN_WORDS.isdisjoint(map(str.lower, others))
    known = gold if changed else f"{gold} {problem}"
    if "?" in answer or len(others) > MOST_WORDS:
        return False
    return all(re.search(START + whole_words([word]), known, re.IGNORECASE) for word in others)


def is_one_number(answer: str, gold: str) -> bool:
    r"""Return True for a number in digits with at most a unit: a decimal, a percentage, or a fraction in lowest terms.

    A fraction of the gold answer need not be in lowest terms.

    >>> [is_one_number(text, "0.5") for text in ("1,500", "-3.5%", r"\frac{16}{25}", "1 1/2 m", "48/2", "2^3", "ten")]
    [True, True, True, True, False, False, False]
    """
    plain, plain_gold = (_LATEX_FRACTION.sub(r" \1\2/\3\4 ", clean(text)).strip() for text in (answer, gold))
    number = _ONE_NUMBER.fullmatch(units.split(plain)[0])
    if number is None:
        return False
    fraction, above, below = number.groups()
    return fraction is None or fraction in plain_gold or (math.gcd(int(above), int(below)) == 1 < int(below))


def example_completion(answer: str, answer_format: str) -> str:
    """Return a completion that keeps to the format and gives ``answer``.

    >>> example_completion("7", "gsm8k")
    'It follows.\\n#### 7'
    >>> all(in_format(example_completion("7", name), name) for name in FORMATS)
    True
    """
    return FORMATS[answer_format].example.replace("ANSWER", answer)
