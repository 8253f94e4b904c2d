"""Answers that hang, fill memory, or break out: each row of cases/hostile_answers.jsonl, and the machine afterwards.

A text there is a list of [piece, count], so that a 100,000-character string takes a short line.
"""

import json
import time
from pathlib import Path

import pytest

from grpo_math.grading import Verdict, grade, grade_batch, pool

CASES = Path(__file__).parents[1] / "cases" / "hostile_answers.jsonl"
TIMEOUT = 1.0


def text(pieces):
    return "".join(piece * count for piece, count in pieces)


@pytest.fixture(scope="module")
def graded():
    """(row, grade, seconds that the call took) for every row, one call each, of a pool that has a worker ready."""
    rows = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    results = []
    for row in rows:
        grade("x^2-1", r"\boxed{(x-1)(x+1)}")  # waits for a worker where the last row had its killed
        started = time.monotonic()
        [result] = grade_batch([text(row["gold"])], [text(row["prediction"])], timeout=TIMEOUT)
        results.append((row, result, time.monotonic() - started))
    return results


def test_every_row_gets_a_verdict_within_the_limit_and_one_second(graded):
    assert len(graded) >= 40
    slow = [(row["kind"], text(row["prediction"])[:60], seconds) for row, _, seconds in graded if seconds > TIMEOUT + 1]
    assert slow == []


def test_a_true_pair_is_never_called_wrong(graded):
    lies = [row for row, g, _ in graded if row["truth"] == "same" and g.verdict in (Verdict.WRONG, Verdict.NO_ANSWER)]
    assert lies == []


def test_a_false_pair_is_never_called_correct(graded):
    assert [row for row, g, _ in graded if row["truth"] == "different" and g.verdict is Verdict.CORRECT] == []


def test_no_row_crashes_a_worker(graded):
    assert [(row, g.reason) for row, g, _ in graded if g.verdict is Verdict.CRASH] == []


def test_the_pool_works_on_afterwards(graded):
    assert grade(r"\sqrt{12}", r"\boxed{2\sqrt{3}}") is Verdict.CORRECT


def test_no_code_in_an_answer_runs(graded):
    assert not Path("/tmp/grpo_math_pwned").exists()


def test_no_worker_is_above_its_memory_limit(graded):
    for pid in pool.shared_pool().pids():
        status = Path(f"/proc/{pid}/status").read_text()
        peak = int(status.split("VmPeak:")[1].split()[0]) * 1024
        assert peak <= pool.MEMORY_BYTES
