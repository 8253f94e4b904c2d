"""Numbers out of what a log holds, and the lines that count of a run that was resumed."""

from __future__ import annotations

import pytest

from grpo_math.run.history import number, numbers, settled


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3), (0.5, 0.5), ("2e-4", 2e-4), (" 7 ", 7.0)]
    + [(value, None) for value in (None, True, "", "dapo", [1], {}, float("nan"), float("inf"), "nan", 10**400)],
)
def test_a_number_is_finite_or_none(value, expected):
    assert number(value) == expected
    assert type(number(value)) is type(expected)


def test_a_row_without_a_step_is_no_line():
    assert numbers({"step": "4", "reward": "x"}) == {"step": 4}
    for row in ({}, {"step": None}, {"step": float("inf")}, {"reward": 1.0}):
        assert numbers(row) is None
    assert settled([{"reward": 1.0}, {"step": 2}]) == [{"step": 2}]
    # transformers logs the figures of a step and its evaluation apart.
    assert settled([{"step": 1, "reward": 0.1}, {"step": 1, "reward": 0.2}]) == [{"step": 1, "reward": 0.2}]
