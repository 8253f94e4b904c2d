"""Every row with a token is computed exactly once, within the budget, and ranks share the work."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_math.trainer.arrange import arrange, over_steps


def tokens(rows, prompts, prompt_tokens, lengths):
    return sum({prompts[r]: prompt_tokens[r] - 1 for r in rows}.values()) + sum(lengths[r] for r in rows)


@st.composite
def batches(draw):
    groups, size = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    of_group = draw(st.lists(st.integers(1, 50), min_size=groups, max_size=groups))
    lengths = draw(st.lists(st.integers(0, 60), min_size=groups * size, max_size=groups * size))
    order = draw(st.permutations(range(groups * size)))
    return [r // size for r in order], [of_group[r // size] for r in order], [lengths[r] for r in order]


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(batches(), st.integers(1, 400), st.integers(1, 5))
def test_rows_are_neither_lost_nor_doubled_and_the_budget_holds(batch, budget, ranks):
    prompts, prompt_tokens, lengths = batch
    plan = arrange(prompts, prompt_tokens, lengths, budget, ranks)
    assert len(plan) == ranks
    assert sorted(row for rank in plan for rows in rank for row in rows) == [r for r, n in enumerate(lengths) if n]
    for rank in plan:
        for rows in rank:
            assert tokens(rows, prompts, prompt_tokens, lengths) <= budget or len(rows) == 1


def test_a_group_stays_together_however_its_rows_were_shuffled():
    assert arrange("abab", [3] * 4, [4, 5, 6, 7], budget=14) == [[[1, 3], [0, 2]]]
    assert arrange("abab", [3] * 4, [4, 5, 6, 7], budget=100) == [[[1, 3, 0, 2]]]


def test_a_group_over_the_budget_is_cut_between_completions_long_with_long():
    assert arrange("aaaa", [5] * 4, [1, 8, 2, 9], budget=21) == [[[1, 3], [0, 2]]]


def test_a_completion_over_the_budget_stays_whole():
    assert arrange("a", [5], [100], budget=10) == [[[0]]]


def test_ranks_get_near_equal_tokens():
    lengths = [90, 10, 20, 30, 40, 50, 60, 70]
    plan = arrange(range(8), [1] * 8, lengths, budget=1000, ranks=2)
    loads = [sum(lengths[row] for rows in rank for row in rows) for rank in plan]
    assert sum(loads) == 370
    assert abs(loads[0] - loads[1]) <= 10
    one_group = arrange("aaaaaaaa", [1] * 8, lengths, budget=1000, ranks=2)  # no rank is left without work
    loads = [sum(lengths[row] for rows in rank for row in rows) for rank in one_group]
    assert max(loads) <= 210


def test_no_tokens_at_all_is_no_micro_batch():
    assert arrange("ab", [3, 3], [0, 0], budget=10, ranks=2) == [[], []]


def test_the_last_steps_are_the_ones_with_work():
    assert over_steps([1, 2], 4) == [[], [], [1], [2]]
    assert over_steps([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4, 5]]
    assert over_steps([], 2) == [[], []]
