"""The trainer of a recipe: the dtype of the weights that it loads."""

from __future__ import annotations

import pytest
import torch
from small_trainers import config
from trl import ModelConfig

from grpo_math.errors import ConfigError
from grpo_math.problems.datasets import load_problems
from grpo_math.trainer import build
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
