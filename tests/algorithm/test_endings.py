"""Completions that a stop string ends: the lengths that are logged of them."""

from types import SimpleNamespace

import pytest

from grpo_math.algorithm.endings import Endings
from grpo_math.generation.request import Request
from grpo_math.run import metrics


@pytest.mark.parametrize(("masks", "lengths"), [(None, (3, 5)), ([[1, 0, 1], [1] * 8, [1, 0, 0, 0, 1]], (2, 2))])
def test_the_lengths_of_ended_completions_have_no_tokens_of_tools_as_with_trl(masks, lengths):
    ids = [[5, 6, 7], [5] * 8, [5, 6, 7, 8, 9]]
    here = SimpleNamespace(device="cpu", gather=lambda tensor: tensor)
    values = Endings(Request(stop=["</answer>"]), 8, [2], masks=False).gather_metrics(ids, masks, here)
    assert (values[metrics.ENDED_MIN], values[metrics.ENDED_MAX]) == lengths
    assert values[metrics.TRUNCATED] == pytest.approx(1 / 3)
