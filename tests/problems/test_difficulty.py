"""The band and the order on made-up rates."""

from __future__ import annotations

import random

from grpo_math.problems import difficulty


def rows_of(rates):
    rows = [{"id": str(i), "problem": f"p{i}", "answer": str(i)} for i in range(len(rates))]
    return rows, {difficulty.key(row): rate for row, rate in zip(rows, rates, strict=True)}


def test_the_band_holds_both_its_ends_and_counts_what_it_drops():
    rows, rates = rows_of([0.0, 0.1, 0.5, 0.9, 1.0, None, 0.05])
    kept, line = difficulty.in_band(rows, rates, 0.1, 0.9)
    assert [row["problem"] for row in kept] == ["p1", "p2", "p3"]
    assert "3 of 7 problems have" in line
    assert line.endswith("1 too easy, 2 too hard, 1 ungradable")


def test_the_order_falls_and_does_not_depend_on_where_rows_stood_except_among_equals():
    values = [random.Random(0).choice([0.0, 0.25, 0.5, 1.0, None]) for _ in range(40)]
    rows, rates = rows_of(values)
    ordered = difficulty.easy_to_hard(rows, rates)
    got = [rates[difficulty.key(row)] for row in ordered]
    assert got == sorted(values, key=lambda rate: -1 if rate is None else rate, reverse=True)
    for rate in set(values):
        same = [int(row["id"]) for row in ordered if rates[difficulty.key(row)] == rate]
        assert same == sorted(same)
