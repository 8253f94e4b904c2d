"""A user's own advantage and loss, ``module:function``: taken as they are, refused early if wrong."""

from __future__ import annotations

import pytest
import torch

from grpo_math.errors import ConfigError
from grpo_math.trainer.advantages import advantages
from grpo_math.trainer.config import MathGRPOConfig

MODULE = """
import torch

def max_rl(rewards):
    mean = rewards.nanmean(dim=1, keepdim=True)
    return (rewards - mean) / mean.clamp(min=1e-6)

def ungraded_too(rewards):
    return torch.ones_like(rewards)


def constant(logps, old_logps, advantages, mask):
    return advantages * 1.0

def over_the_batch(logps, old_logps, advantages, mask):
    return -advantages * logps / (logps * mask).sum()

def too_few(*tensors):
    return tensors[0].sum()

def broken(*tensors):
    raise KeyError("x")
"""


@pytest.fixture(autouse=True)
def extra(tmp_path, monkeypatch):
    (tmp_path / "own_math.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_own_advantage_is_taken_as_it_is_and_an_ungraded_completion_has_none():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, torch.nan, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[3.0, -1.0, -1.0, -1.0], [0.0] * 4, [0.0] * 4])
    torch.testing.assert_close(advantages(rewards, "own_math:max_rl"), expected)
    torch.testing.assert_close(advantages(rewards, "own_math:ungraded_too"), (~rewards.isnan()).float())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"baseline": "own_math:max_rI"}, r"names no function of own_math: use one of its functions: max_rl"),
        ({"baseline": "no_such_module:f"}, r"names a module that cannot be imported \(ModuleNotFoundError"),
        ({"baseline": "own_math:too_few"}, r"returned a Tensor: return a tensor of shape \(2, 8\)"),
        ({"baseline": "own_math:broken"}, r"baseline='own_math:broken' raised KeyError"),
        ({"surrogate": "own_math:too_few"}, r"returned a Tensor: return a tensor of shape \(2, 3\)"),
        ({"surrogate": "own_math:constant"}, "returned a loss without a gradient"),
        ({"surrogate": "own_math:over_the_batch"}, "gives a completion a different loss in a batch than alone"),
        ({"surrogate": "small_trainers:clip", "loss_type": "cispo"}, "loss_type='cispo' is a weight of the ratio"),
    ],
)
def test_what_cannot_work_is_refused_before_weights_load(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        MathGRPOConfig(str(tmp_path), **settings)
