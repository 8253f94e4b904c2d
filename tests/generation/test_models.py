"""The weights in a folder against its config.json; what training and doctor make of it is in test_doctor.py."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_math.errors import ConfigError
from grpo_math.generation.models import check_weights


def changed(folder: str, to: Path, drop: str = "", **added: torch.Tensor) -> str:
    """A copy of a model whose file of weights lacks one tensor and has others."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    tensors.pop(drop, None)
    save_file({**tensors, **added}, to / "model.safetensors", metadata={"format": "pt"})
    return str(to)


def test_weights_are_checked_under_zero3_too(tiny):
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

    zero3 = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    check_weights(tiny("llama"))
    assert is_deepspeed_zero3_enabled()
    assert zero3.is_zero3()


def test_a_tensor_that_would_be_made_up_is_named(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"lacks weights .* such as lm_head\.weight"):
        check_weights(changed(tiny("llama"), tmp_path / "m", drop="lm_head.weight"))


def test_either_end_of_tied_weights_is_enough_and_layers_that_predict_further_tokens_are_no_mistake(tiny, tmp_path):
    embedding = "model.embed_tokens.weight"
    weight = load_file(f"{tiny('qwen2')}/model.safetensors")[embedding]
    further = {"model.layers.2.eh_proj.weight": torch.zeros(2, 2)}
    check_weights(changed(tiny("qwen2"), tmp_path / "m", drop=embedding, **{"lm_head.weight": weight}, **further))
