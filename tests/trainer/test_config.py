"""Settings: the dtype of the weights, refused values, and functions of a user."""

from __future__ import annotations

import pytest
import torch
from small_trainers import config
from trl import ModelConfig

from grpo_math.errors import ConfigError
from grpo_math.problems.datasets import load_problems
from grpo_math.trainer import build
from grpo_math.trainer.advantages import advantages
from grpo_math.trainer.config import MathGRPOConfig


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "stated", "dtype"), [(False, "auto", torch.float32), (True, "auto", torch.bfloat16)])
def test_auto_keeps_float32_for_weights_that_adamw_trains_without_a_copy(
    lora, stated, dtype, tiny, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(build, "fast_dtype", lambda use_cpu: "bfloat16")
    model = ModelConfig(tiny("llama"), dtype=stated, use_peft=lora, lora_target_modules=["q_proj", "v_proj"])
    rows = list(load_problems("generated:sums", limit=4))
    trainer = build.trainer_of(
        config(MathGRPOConfig, tmp_path), model, rows, tokenizer, [lambda prompts, **_: [0.0] * len(prompts)]
    )
    assert trainer.model.get_input_embeddings().weight.dtype == dtype


def test_a_card_that_emulates_bfloat16_trains_in_float32(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert config(MathGRPOConfig, tmp_path, bf16=None).bf16 is False
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert config(MathGRPOConfig, tmp_path, bf16=None).bf16 is True


def test_activations_are_not_offloaded_from_a_cpu(tmp_path):
    with pytest.raises(ConfigError, match="activation_offloading=True has no GPU here"):
        config(MathGRPOConfig, tmp_path, activation_offloading=True, gradient_checkpointing=True)


def test_float16_is_refused_unless_it_is_asked_for(tmp_path):
    with pytest.raises(ConfigError, match=r"fp16=True has given NaN .*: use bf16, .* or add allow_float16: true"):
        MathGRPOConfig(str(tmp_path), fp16=True)


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
