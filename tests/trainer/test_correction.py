"""The metrics of the correction between sampler and trainer, on rollouts whose numbers can be checked by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_math.trainer import correction

ALONE = SimpleNamespace(gather=lambda sums: sums)
LENGTHS = (1, 2, 4, 8)


def rollout(ratio: Tensor, differences: Tensor | None = None, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float()
    sampled = torch.full_like(mask, -1.0)
    trained = sampled + (torch.zeros_like(mask) if differences is None else differences)
    names = "completion_mask", "old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"
    return dict(zip(names, (mask, trained, sampled, ratio), strict=True))


def test_a_sequence_weight_counts_for_each_token_of_its_completion():
    figures = correction.figures(rollout(torch.tensor([[1.0], [1.0], [0.5], [0.0]])), ALONE)
    assert figures["sampling/dropped_tokens"] == pytest.approx(8 / 15)
    assert figures["sampling/dropped_completions"] == 0.25
    assert figures["sampling/effective_share"] == pytest.approx(2.5**2 / (4 * 2.25))
    weights = [figures[f"sampling/weight/{part}"] for part in ("shortest", "shorter", "longer", "longest")]
    assert weights == [1.0, 1.0, 0.5, 0.0]


def test_a_token_weight_counts_for_its_own_token_alone():
    ratio = torch.ones(4, 8)
    ratio[3, :2] = 0.0
    ratio[0, 1:] = 0.0  # padding
    figures = correction.figures(rollout(ratio), ALONE)
    assert figures["sampling/dropped_tokens"] == pytest.approx(2 / 15)
    assert figures["sampling/dropped_completions"] == 0.0
    assert figures["sampling/weight/longest"] == 0.75


def test_the_spread_is_the_standard_deviation_of_one_token():
    torch.manual_seed(0)
    noise = torch.randn(400, 256) * 0.025
    figures = correction.figures(rollout(torch.ones(400, 1), noise, lengths=(256,) * 400), ALONE)
    assert figures["sampling/logp_sum_spread"] == pytest.approx(0.025, rel=0.15)


def test_a_token_without_a_log_prob_of_the_sampler_counts_as_equal():
    differences = torch.zeros(4, 8)
    differences[3, 0] = math.nan
    assert correction.figures(rollout(torch.ones(4, 1), differences), ALONE)["sampling/logp_sum_spread"] == 0.0


def test_the_rows_of_all_ranks_count():
    first, second = rollout(torch.tensor([[1.0]]), lengths=(2,)), rollout(torch.tensor([[0.0]]), lengths=(6,))
    sent: list[Tensor] = []
    correction.figures(first, SimpleNamespace(gather=lambda sums: sent.append(sums) or sums))
    both = SimpleNamespace(gather=lambda sums: torch.cat([*sent, sums]))
    figures = correction.figures(second, both)
    assert figures["sampling/dropped_tokens"] == 0.75
    assert figures["sampling/dropped_completions"] == 0.5


def test_without_a_correction_or_tokens_there_is_nothing_to_log():
    empty = rollout(torch.ones(4, 1))
    empty["completion_mask"][:] = 0
    for rows in (empty, {"completion_mask": torch.ones(1, 1)}):
        assert correction.figures(rows, ALONE) == {}
