"""Completions that a stop string ends: the lengths that are logged of them."""

from types import SimpleNamespace

import pytest

from grpo_math.algorithm.stop_conditions import StopConditions
from grpo_math.generation.request import Request, request_from
from grpo_math.run import metrics


@pytest.mark.parametrize(("masks", "lengths"), [(None, (3, 5)), ([[1, 0, 1], [1] * 8, [1, 0, 0, 0, 1]], (2, 2))])
def test_the_lengths_of_ended_completions_have_no_tokens_of_tools_as_with_trl(masks, lengths):
    ids = [[5, 6, 7], [5] * 8, [5, 6, 7, 8, 9]]
    here = SimpleNamespace(device="cpu", gather=lambda tensor: tensor)
    values = StopConditions(Request(stop=["</answer>"], max_new_tokens=8), [2]).gather_metrics(ids, masks, here)
    assert (values[metrics.ENDED_MIN], values[metrics.ENDED_MAX]) == lengths
    assert values[metrics.TRUNCATED] == pytest.approx(1 / 3)


def test_a_completion_that_the_limit_of_a_scripts_generation_kwargs_ended_is_truncated():
    settings = {"generation_kwargs": {"stop": "</answer>", "max_tokens": 4}, "max_completion_length": 8}
    stops = StopConditions(request_from(settings), [2])
    assert [stops.is_truncated([5] * length) for length in (3, 4)] == [False, True]
