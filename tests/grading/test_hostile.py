"""Answers that hang, fill memory, or break out: each row of cases/hostile_answers.jsonl, and the machine afterwards.

A text there is a list of [piece, count], so that a 100,000-character string takes a short line.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from string import ascii_letters

import pytest

from grpo_math.grading import Verdict, grade, grade_batch
from grpo_math.grading.where import TAIL
from grpo_math.grading.workers import MEMORY_BYTES, shared_pool

CASES = Path(__file__).parents[1] / "cases" / "hostile_answers.jsonl"

LIMIT = 0.5
CALLER = 0.1  # seconds of CPU time in this process: ten times what the documentation says, for a slow machine
PWNED = "/tmp/grpo_math_pwned"  # what the rows would make


def text(pieces):
    return "".join(piece * count for piece, count in pieces)


@pytest.fixture(scope="module")
def pwned():
    """A path that no other program uses, without a digit that could be an answer."""
    return Path(tempfile.gettempdir(), "grpo_math_pwned_" + "".join(random.SystemRandom().choices(ascii_letters, k=12)))


@pytest.fixture(scope="module")
def graded(pwned):
    """(row, grade, seconds of CPU time in this process) for every row, one call each, with a worker ready."""
    rows = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    results = []
    assert sum(PWNED in text(row["prediction"]) for row in rows) >= 2
    for row in rows:
        prediction = text(row["prediction"]).replace(PWNED, str(pwned))
        grade("x^2-1", r"\boxed{(x-1)(x+1)}")  # waits for a worker where the last row had its killed
        started = time.process_time()
        [result] = grade_batch([text(row["gold"])], [prediction], timeout=LIMIT)
        results.append((row, result, time.process_time() - started))
    return results


@pytest.mark.slow
def test_every_row_costs_this_process_little(graded):
    assert [(row["kind"], seconds) for row, _, seconds in graded if seconds > CALLER] == []


@pytest.mark.slow
def test_a_true_pair_is_never_called_wrong(graded):
    same = [(row, g) for row, g, _ in graded if row["truth"] == "same" and len(text(row["prediction"])) <= TAIL]
    assert len(same) >= 20
    assert [row for row, g in same if g.verdict in (Verdict.WRONG, Verdict.NO_ANSWER)] == []


@pytest.mark.slow
def test_a_false_pair_is_never_called_correct(graded):
    assert [row for row, g, _ in graded if row["truth"] == "different" and g.verdict is Verdict.CORRECT] == []


@pytest.mark.slow
def test_no_answer_makes_itself_ungradable(graded):
    """Otherwise a policy could leave its bad answers out of the group's mean."""
    rows = [(row, g) for row, g, _ in graded if text(row["gold"]) == "42"]
    assert len(rows) >= 40
    assert [(row["kind"], g.reason) for row, g in rows if g.verdict.ungradable] == []


@pytest.mark.slow
def test_no_code_in_an_answer_ran_and_the_workers_are_within_their_memory(graded, pwned):
    assert not pwned.exists()
    assert grade(r"\sqrt{12}", r"\boxed{2\sqrt{3}}") is Verdict.CORRECT
    for worker in shared_pool().workers:
        status = Path(f"/proc/{worker.process.pid}/status").read_text()
        peak = int(status.split("VmPeak:")[1].split()[0]) * 1024
        assert peak <= MEMORY_BYTES


WORDS = r"""
. , ; ? ! ' " ` * ** _ $ # #### ( ) [ { {} } | / \ \\ ^ ^{ & % ° < = + - 0 1 1, 1= 1/ a/b x= x ½ √ ∛ ﷺ − \( \[ \{ \text{
\text{a} \boxed{ \boxed{} \boxed{1} <answer> <answer></answer> </answer> answer answer: </think> option (A) 1{,} \pm
"""
SPACED = ["x ", "1 ", "\n", "\n1", "a b ", "5 a-", " (a", "of a", "answer is, because ", "the answer is ", "not 5 "]
PIECES = [*WORDS.split(), *SPACED]
ENDINGS = ((r"\boxed{", ")}"), (r"\boxed{5 ", " (a b)}"), (r"\boxed{", " percent}"), ("<answer>", "5</answer>"))
PROGRAM = """
import json, resource, sys
from grpo_math.grading.batch import _quick
from grpo_math.grading.formats import FORMATS, in_format
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
for text in json.load(sys.stdin):
    for name in FORMATS:
        in_format(text, name)
    for answer_format in (None, "gsm8k", "xml"):
        _quick("42", text, answer_format)
"""
LONG = [
    "<|a",
    "<<1",
    "$1$ ",
    "(1,",
    "(a) ",
    "\\boxed{1}, ",
    "\\boxed 1 ",
    "#### 1\n",
    "\\a{b}",
    "1 a b per ",
    "\\fbox ",
    "答案",
]


def test_no_pattern_goes_over_an_answer_again_and_again():
    """No tracer counts a pattern's steps. All this takes 6 seconds of CPU time; one cubic pattern takes minutes."""
    texts = [opening + piece * (1900 // len(piece)) + closing for piece in PIECES for opening, closing in ENDINGS]
    texts += [opening + piece * (TAIL // len(piece)) for piece in [*PIECES, *LONG] for opening in ("", "answer is ")]
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=json.dumps(texts), text=True)
    assert done.returncode == 0
