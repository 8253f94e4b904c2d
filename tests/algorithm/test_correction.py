"""The metrics of the correction between sampler and trainer, on rollouts whose numbers can be checked by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from grpo_math.algorithm import correction
from grpo_math.algorithm.losses import LossSettings

LENGTHS = (1, 2, 4, 8)


def figures(ratio, differences=0.0, lengths=LENGTHS, gather=lambda sums: sums):
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float()
    sampled = torch.full_like(mask, -1.0)
    rows = {
        "completion_mask": mask,
        "old_per_token_logps": sampled + differences,
        "sampling_per_token_logps": sampled,
        "importance_sampling_ratio": ratio,
    }
    values = correction.gather_metrics(rows, SimpleNamespace(gather=gather))
    return {name.removeprefix("sampling/"): value for name, value in values.items()}


def test_a_sequence_weight_counts_for_each_token_of_its_completion_and_a_nan_as_an_equal_log_prob():
    differences = torch.zeros(4, 8)
    differences[3, :3] = torch.tensor([math.nan, 0.6, -0.8])
    differences[0, 1] = 9.0  # padding
    assert figures(torch.tensor([[1.0], [1.0], [0.5], [0.0]]), differences) == pytest.approx(
        {
            "dropped_tokens": 8 / 15,
            "dropped_completions": 1 / 4,
            "effective_share": 2.5**2 / (4 * 2.25),
            "logp_sum_spread": 0.2 / math.sqrt(15),
            "weight/shortest": 1.0,
            "weight/shorter": 1.0,
            "weight/longer": 0.5,
            "weight/longest": 0.0,
        }
    )


def test_a_token_weight_counts_for_its_own_token_alone():
    ratio = torch.ones(4, 8)
    ratio[3, :2] = 0.0
    ratio[0, 1:] = 0.0  # padding
    seen = figures(ratio)
    assert (seen["dropped_tokens"], seen["dropped_completions"]) == (pytest.approx(2 / 15), 0.0)
    assert seen["weight/longest"] == 0.75


def test_a_long_completion_keeps_its_gradient_in_the_geometric_mask_unless_all_its_tokens_drift():
    """Noise of 0.025 nats a token, as in docs/scaling.md. The kept gradient is the mean weight: the exact one is 1."""
    tokens = 4096
    noise = 0.025 * torch.randn(1000, tokens, generator=torch.Generator().manual_seed(0)) - 0.025**2 / 2
    mask, zeros = torch.ones(1000, tokens), torch.zeros(1000, tokens)
    for mode, mean in (("sequence_mask", 0.45), ("geometric_mask", 1.0)):
        settings = LossSettings(vllm_importance_sampling_mode=mode)
        weights = correction.sampler_weights(noise, zeros, mask, settings)
        assert weights.mean().item() == pytest.approx(mean, abs=0.05), mode
    drifted = correction.sampler_weights(noise + 0.02, zeros, mask, settings)
    assert drifted.sum() == 0


def test_the_geometric_mask_is_a_mean_over_known_tokens_and_may_keep_the_weight_of_each_token():
    # The ratios 1.6 and 1 / 1.55 with the mean 1.016, and the same without the drift; the padding must not count.
    logps = torch.tensor([[1.6, 1 / 1.55, 1.0], [1.6, 1 / 1.6, 9.0], [4.0, 0.25, 1.0]]).log()
    zeros, mask = torch.zeros(3, 3), torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1]])
    settings = LossSettings(vllm_importance_sampling_mode="geometric_mask")
    assert correction.sampler_weights(logps, zeros, mask, settings).tolist() == [[0.0], [1.0], [1.0]]
    # A mean over one token, and over none.
    single = torch.tensor([[1.015, 1.0], [9.0, 1.0]]).log(), zeros[:2, :2], torch.tensor([[1, 0], [0, 0]])
    assert correction.sampler_weights(*single, settings).tolist() == [[0.0], [1.0]]
    # The bounds are kept.
    exact = replace(settings, geometric_mask_low=1.0, geometric_mask_high=1.0)
    assert correction.sampler_weights(zeros, zeros, mask, exact).tolist() == [[1.0]] * 3


def test_the_rows_of_all_ranks_count_and_a_quarter_without_completions_has_no_weight():
    sent = []
    figures(torch.tensor([[1.0]]), lengths=(2,), gather=lambda sums: sent.append(sums) or sums)
    seen = figures(torch.tensor([[0.0], [1.0]]), lengths=(6, 0), gather=lambda sums: torch.cat([*sent, sums]))
    assert (seen["dropped_tokens"], seen["dropped_completions"]) == (0.75, 0.5)
    assert {name: value for name, value in seen.items() if "weight" in name} == {
        "weight/shortest": 1.0,
        "weight/shorter": 0.0,
    }
