r"""Worker side: the verdict on two answers that the quick paths left open. The only module that imports Math-Verify.

First the same structural comparison with numeric leaves; Math-Verify where an answer is outside our grammar (sums,
integrals, sets in builder notation) or cannot be evaluated.

Does not guard itself: the process that runs it has a memory limit, and is killed when its time is over.
"""

import logging
import re

import math_verify.grader
import math_verify.parser
from latex2sympy2_extended import NormalizationConfig, latex2sympy2
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, MatrixBase

from grpo_math.grading.clean import clean
from grpo_math.grading.compare import compare, readings
from grpo_math.grading.house import HOUSE, House
from grpo_math.grading.numeric import NUMERIC, Overflow
from grpo_math.grading.words import beyond, pure, several

NAME = re.compile(r"[A-Za-z](?:_\w+|'+)?(?:\([^()=]*\))?|[A-Z]{1,3}")  # what an answer may call its value
MAX_CHARACTERS = 400  # its parser's time grows faster than the text; golds of MATH have at most 159

CONFIG = [
    LatexExtractionConfig(
        boxed_match_priority=-1,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none", equations=False
        ),
    )
]


def prepare() -> None:
    """Set this process up as a worker: no log lines, Math-Verify lets two errors through, and has worked once.

    Math-Verify answers "no" after any Exception. Running out of memory or stack is no answer: within its modules the
    name Exception means all others, so that these two reach the worker's loop and become `crash`.
    """
    logging.disable(logging.CRITICAL)
    kinds = (*Exception.__subclasses__(), *RuntimeError.__subclasses__())
    ordinary = tuple(kind for kind in kinds if kind not in (MemoryError, RuntimeError, RecursionError))
    for module in (math_verify.grader, math_verify.parser, latex2sympy2):
        setattr(module, "Exception", ordinary)  # noqa: B010
    judge(r"\int_0^1 x dx", r"\sum_{i=1}^{3} \frac{i}{12}")  # the first parse and comparison take a tenth of a second


def judge(gold: str, answer: str, house: House = HOUSE) -> tuple[str, str]:
    """The verdict and its reason."""
    try:
        verdict, reason = compare(gold, answer, NUMERIC, house)
    except Overflow:
        return "timeout", "a power too large to compute"
    if verdict is not None:
        return str(verdict), "numeric" if reason == "trees" else reason
    if max(len(gold), len(answer)) > MAX_CHARACTERS:
        return ("bad_gold" if len(gold) > MAX_CHARACTERS else "unparseable"), f"more than {MAX_CHARACTERS} characters"
    plain_gold, plain_answer = clean(gold), clean(answer)
    if not pure(plain_answer) or not (beyond(plain_gold) or beyond(plain_answer)):
        return "wrong", "cannot be compared"
    gold_sides, sides = (without_conditions(text).split("=") for text in (gold, answer))
    unnamed = len(sides) > 2 or NAME.fullmatch(sides[0].strip()) is None
    if len(sides) > max(len(gold_sides), 2 - unnamed):  # it would compare the last member of a chain alone
        return "wrong", "a chain"
    if several(answer) - several(gold):  # it would take what it can read out of them
        return "wrong", "more than one answer"
    gold_read, answer_read = bool(readings(plain_gold)), bool(readings(plain_answer))
    gold_parsed, answer_parsed = _parsed(gold), _parsed(answer)
    if not gold_parsed:
        return ("bad_gold", "the gold cannot be read") if not gold_read else ("wrong", "only the gold can be read")
    if not answer_parsed:
        return ("unparseable", "the answer cannot be read") if not answer_read else ("wrong", "Math-Verify")
    equal = verify(gold_parsed, answer_parsed, timeout_seconds=None)
    return ("correct" if equal else "wrong"), "Math-Verify"


def without_conditions(text: str) -> str:
    r"""The text without the "i = 1" of a sum and without what a set in builder notation says of its members.

    >>> without_conditions(r"\sum_{i=1}^{3} i = 6"), without_conditions(r"\{x \mid x = 2\}")
    ('\\sum^{3} i = 6', '\\{x \\mid \\}')
    """
    text = re.sub(r"_\s*\{[^{}]*\}", "", text)
    return re.sub(r"(\\mid|[|:])[^{}=]*(?:\{[^{}]*\}[^{}=]*)*=[^{}=]*(?=\\\})", r"\1 ", text)


def _parsed(text: str) -> list[Basic | MatrixBase]:
    # Expressions only: a string inside sympy's containers would be sympified, and that evaluates it.
    found = parse(f"${text}$", extraction_config=CONFIG, fallback_mode="no_fallback", parsing_timeout=None)
    return [item for item in found if isinstance(item, (Basic, MatrixBase))]
