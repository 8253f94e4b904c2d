r"""The program of a worker: read jobs from stdin, write verdicts to stdout, one line of JSON each.

    echo '["\\sqrt{12}", "2\\sqrt{3}", [], 5.0]' | python -m grpo_math.grading.judge 1000000000

The first argument is the memory limit in bytes. A job is a gold answer, an answer, the fields of `GradingPolicy`, and
seconds of CPU time. The kernel kills the worker when the time is over. Answers are compared by their structure, and
expressions in them by their numeric values. Math-Verify compares answers that our grammar cannot read: integrals,
limits, sets in builder notation.

workers.py limits real time. No module imports this one.
"""

import json
import logging
import os
import re
import resource
import signal
import sys
from pathlib import Path

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Limit, MatrixBase

from grpo_math.grading.equal.clean import clean
from grpo_math.grading.equal.compare import compare, readings
from grpo_math.grading.equal.numeric import NUMERIC, Overflow
from grpo_math.grading.equal.words import beyond, pure, several
from grpo_math.grading.verdict import POLICY, GradingPolicy, Verdict

NAME = re.compile(r"[A-Za-z](?:_\w+|'+)?(?:\([^()=]*\))?|[A-Z]{1,3}")  # the name of a value in an answer
ONE_SIDED = re.compile(r"\\to[^{}]*\^\s*\{?\s*\+")
MAX_CHARACTERS = 400  # Math-Verify's parser takes more than linear time; gold answers of MATH have at most 159

CONFIG = [
    LatexExtractionConfig(
        boxed_match_priority=-1,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none", equations=False
        ),
    )
]


def main() -> None:
    memory = int(sys.argv[1])
    # These signals go to the whole process group. The trainer needs the worker to finish its step.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of a library must not mix with the replies
    logging.disable(logging.CRITICAL)
    sys.setrecursionlimit(3000)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if memory and not 0 <= hard < memory:  # an infinite limit is -1
        resource.setrlimit(resource.RLIMIT_AS, (memory, hard))
    # Math-Verify's first comparison takes a tenth of a second: make it before the first job.
    judge(r"\int_0^1 x dx", r"\sum_{i=1}^{3} \frac{i}{12}")
    print('"ready"', file=replies)
    for line in sys.stdin:
        gold, answer, policy, limit = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit)
        try:
            verdict, reason = judge(gold, answer, GradingPolicy(*policy))
        except MemoryError:
            sys.exit(1)  # the caller asks another worker
        except Exception as error:
            verdict, reason = "uncheckable", f"{type(error).__name__} in the worker"
        # A worker that has grown has too little memory left for ordinary answers: report it, so that it is replaced.
        print(json.dumps([verdict, reason, bool(memory) and address_space() > memory // 2]), file=replies)


def address_space() -> int:
    """Return the address space of this process in bytes, or 0 if the system is not Linux."""
    sizes = Path("/proc/self/statm")
    return int(sizes.read_text().split()[0]) * resource.getpagesize() if sizes.exists() else 0


def judge(gold: str, answer: str, policy: GradingPolicy = POLICY) -> tuple[str, str]:
    """Return the verdict on two answers and the rule that decided."""
    try:
        verdict, reason = compare(gold, answer, NUMERIC, policy)
    except Overflow:
        return "uncheckable", "a power too large to compute"
    if isinstance(verdict, Verdict):
        return str(verdict), "numeric" if reason == "trees" else reason
    if max(len(gold), len(answer)) > MAX_CHARACTERS:
        return ("bad_gold" if len(gold) > MAX_CHARACTERS else "uncheckable"), f"more than {MAX_CHARACTERS} characters"
    plain_gold, plain_answer = clean(gold), clean(answer)
    if not pure(plain_answer) or not (beyond(plain_gold) or beyond(plain_answer)):
        return "wrong", "cannot be compared"
    gold_sides, sides = (without_conditions(text).split("=") for text in (gold, answer))
    unnamed = len(sides) > 2 or NAME.fullmatch(sides[0].strip()) is None
    # Math-Verify would compare only the last member of a chain, and only the part of several answers that it can read.
    if len(sides) > max(len(gold_sides), 2 - unnamed):
        return "wrong", "a chain"
    if several(answer) - several(gold):
        return "wrong", "more than one answer"
    gold_parsed, answer_parsed = _parsed(gold), _parsed(answer)
    if not gold_parsed:
        return "wrong", "only the text of the gold answer can be compared"
    if not answer_parsed:
        return ("wrong", "Math-Verify") if readings(plain_answer) else ("unparseable", "the answer cannot be read")
    equal = verify(gold_parsed, answer_parsed, timeout_seconds=None)
    return ("correct" if equal else "wrong"), "Math-Verify"


def without_conditions(text: str) -> str:
    r"""Return the text without the "i = 1" of a sum and without the conditions of a set in builder notation.

    >>> without_conditions(r"\sum_{i=1}^{3} i = 6"), without_conditions(r"\{x \mid x = 2\}")
    ('\\sum^{3} i = 6', '\\{x \\mid \\}')
    """
    text = re.sub(r"_\s*\{[^{}]*\}", "", text)
    return re.sub(r"(\\mid|[|:])[^{}=]*(?:\{[^{}]*\}[^{}=]*)*=[^{}=]*(?=\\\})", r"\1 ", text)


def _parsed(text: str) -> list[Basic | MatrixBase]:
    # Expressions only: a string inside sympy's containers would be sympified, and that evaluates it.
    parsed = parse(f"${text}$", extraction_config=CONFIG, fallback_mode="no_fallback", parsing_timeout=None)
    items = [item for item in parsed if isinstance(item, (Basic, MatrixBase))]
    # Without a side, a limit is that from the right for sympy, also if the limit from the left is another.
    return (
        items if ONE_SIDED.search(text) else [item.replace(Limit, lambda *of: Limit(*of[:3], "+-")) for item in items]
    )


if __name__ == "__main__":
    main()
