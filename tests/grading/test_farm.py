"""100 golds of GSM8K and MATH, each rewritten in ways that keep its value and in ways that do not (tests/rewrites)."""

import os
from pathlib import Path

import pytest
from rewrites import drawn, rewritings

from grpo_math.grading import grade_batch

DATA = os.environ.get("GRPO_MATH_DATA")


@pytest.mark.slow
@pytest.mark.skipif(not DATA, reason="GRPO_MATH_DATA is not set")
def test_of_100_golds_rewritten_at_most_3_in_1000_wrong_are_paid_and_5_in_1000_right_are_not():
    rows = [row for gold in drawn(Path(str(DATA)), n=100, seed=0) for row in rewritings(gold, seed=0)]
    assert len({row.kind for row in rows if row.equivalent}) >= 40
    assert len({row.kind for row in rows if not row.equivalent}) >= 40
    grades = grade_batch([row.gold for row in rows], [row.prediction for row in rows])
    missed = [(r, g) for r, g in zip(rows, grades, strict=True) if (str(g.verdict) == "correct") != r.equivalent]
    for row, grade in missed:
        print(f"{'unpaid' if row.equivalent else 'PAID'} {row.kind}: {row.gold!r} {row.prediction!r} -> {grade}")
    for equivalent, share in ((False, 0.003), (True, 0.005)):
        misses = sum(row.equivalent is equivalent for row, _ in missed)
        assert misses <= share * sum(row.equivalent is equivalent for row in rows)
