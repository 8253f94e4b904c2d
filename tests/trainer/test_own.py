"""An advantage and a loss of one's own, ``module:function``: exact as the built-in ones, refused early where wrong."""

from __future__ import annotations

import pytest
import torch
from small_trainers import SMALL, letters, make, relative, weights
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

from grpo_math.errors import ConfigError
from grpo_math.settings.fields import fields
from grpo_math.trainer.advantages import SCALES, advantages
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.trainer import MathGRPOTrainer

MODULE = """
import torch

def max_rl(rewards):
    mean = rewards.nanmean(dim=1, keepdim=True)
    return (rewards - mean) / mean.clamp(min=1e-6)

def ungraded_too(rewards):
    return torch.ones_like(rewards)


def group_mean(rewards):
    mean = rewards.nanmean(dim=1, keepdim=True)
    n = (~rewards.isnan()).sum(dim=1, keepdim=True)
    std = ((rewards - mean).square().nansum(dim=1, keepdim=True) / (n - 1)).sqrt()
    return (rewards - mean) / (std + 1e-4)

def clip(logps, old_logps, advantages, mask):
    ratio = (logps - old_logps).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)

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
def own(tmp_path, monkeypatch):
    (tmp_path / "own_math.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def trained(tiny, tokenizer, folder, **settings):
    extra = {**SMALL, "advantage_eps": 1e-4, **settings}
    if ":" in extra.get("baseline", ""):
        del extra["advantage_eps"]
    trainer = make(MathGRPOTrainer, MathGRPOConfig, tiny("llama"), tokenizer, folder, letters, **extra)
    trainer.train()
    return weights(trainer.model)


UPDATES = {
    "one update a rollout": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "three updates a rollout, and a KL term": {"num_iterations": 3, "beta": 0.1},
    "our KL term": {"num_iterations": 2, "beta": 0.1, "kl_estimator": "k2"},
    "each completion by itself": {"loss_type": "grpo", "gradient_accumulation_steps": 2},
    "each micro-batch by its tokens": {"loss_type": "bnpo"},
}


@pytest.mark.full(keep=["one update a rollout-False"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("updates", UPDATES)
def test_the_clipped_ratio_as_a_function_of_ones_own_trains_the_same_weights(
    updates, packed, tiny, tokenizer, tmp_path
):
    settings = {"pack_updates": packed, **UPDATES[updates]}
    own = trained(tiny, tokenizer, tmp_path / "own", surrogate="own_math:clip", **settings)
    assert relative(own, trained(tiny, tokenizer, tmp_path / "built in", **settings)) < 1e-5


@pytest.mark.full
def test_group_mean_as_a_function_of_ones_own_trains_what_trl_trains(trl_weights, tiny, tokenizer, tmp_path):
    own = trained(tiny, tokenizer, tmp_path, baseline="own_math:group_mean")
    assert relative(own, trl_weights(letters, SMALL)[1]) < 1e-5


@pytest.mark.slow
def test_a_scale_that_trl_does_not_know_trains_and_one_that_nobody_knows_is_refused(
    monkeypatch, tiny, tokenizer, tmp_path
):
    scale = fields()["scale_rewards"]
    monkeypatch.setitem(fields(), "scale_rewards", scale._replace(choices=(*scale.choices, "twice")))
    monkeypatch.setitem(SCALES, "twice", lambda rewards: 2 * SCALES["group"](rewards))
    kept = {"advantage_eps": 1e-30, "max_steps": 1, "learning_rate": 0.05}
    start = weights(AutoModelForCausalLM.from_pretrained(tiny("llama")))
    moved = [
        relative(trained(tiny, tokenizer, tmp_path / scale, scale_rewards=scale, **kept), start)
        for scale in ("group", "twice")
    ]
    assert moved[0] == pytest.approx(2 * moved[1], rel=1e-3)
    with pytest.raises(ConfigError, match="scale_rewards='thrice' is not known"):
        MathGRPOConfig(str(tmp_path), scale_rewards="thrice")
    with pytest.raises(ConfigError, match="scale_rewards='thrice' is not known"):
        make(MathGRPOTrainer, GRPOConfig, tiny("llama"), tokenizer, tmp_path, letters, scale_rewards="thrice")


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
        ({"surrogate": "own_math:clip", "loss_type": "cispo"}, "loss_type='cispo' is a weight of the ratio"),
    ],
)
def test_what_cannot_work_is_refused_before_weights_load(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        MathGRPOConfig(str(tmp_path), **settings)


def test_a_recipe_and_the_command_line_take_it():
    from grpo_math.settings.recipe import read

    settings = read(["--baseline", "own_math:max_rl", "--surrogate", "own_math:clip"])
    assert not settings.problems
    assert settings.values["baseline"] == "own_math:max_rl"
