"""config.json -> shapes: known models to the parameter, every family against transformers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_math.errors import ConfigError, UserError
from grpo_math.planner.model import FAMILIES, read_config, shape_of, shipped

PARAMETERS = json.loads((Path(__file__).parents[1] / "cases/model_parameters.json").read_text())
SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def built(config: dict) -> int:
    """Parameters of transformers' own model, made without memory."""
    fields = {"pad_token_id": 0} | {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shipped_shape_has_the_published_number_of_parameters(name):
    assert shape_of(name, shipped()[name]).total == PARAMETERS[name]


def test_every_shipped_shape_has_its_published_number_here():
    assert set(PARAMETERS) == set(shipped())


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-1.5B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "google/gemma-2-2b"])
def test_transformers_makes_as_many_parameters_of_it(name):
    assert built(shipped()[name]) == PARAMETERS[name]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact(family, tied):
    config = {**SMALL, "model_type": family, "tie_word_embeddings": tied, "head_dim": 12}
    assert shape_of(family, config).total == built(config)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_attention_biases_are_counted(family):
    config = {**SMALL, "model_type": family, "attention_bias": True, "head_dim": 16}
    assert shape_of(family, config).total == built(config)


def test_mlp_biases_are_counted():
    config = {**SMALL, "model_type": "llama", "mlp_bias": True}
    assert shape_of("llama", config).total == built(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_takes(family):
    config = {**SMALL, "model_type": family}
    assert shape_of(family, config).total == built(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sliding_window_is_what_transformers_takes(family):
    real = AutoConfig.for_model(family, **SMALL)
    slides = getattr(real, "use_sliding_window", True) and getattr(real, "sliding_window", None)
    config = json.loads(real.to_json_string(use_diff=False))
    assert bool(shape_of(family, config).sliding_window) == bool(slides)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "mamba"}, "no formula"),
        ({}, "no formula"),
        ({**SMALL, "model_type": "llama", "hidden_size": None}, "hidden_size"),
        ({**SMALL, "model_type": "llama", "num_hidden_layers": 0}, "num_hidden_layers"),
        ({**SMALL, "model_type": "llama", "num_attention_heads": 7}, "not a multiple"),
        ({**SMALL, "model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_what_is_not_known_is_refused_by_name(config, says):
    with pytest.raises(ConfigError) as refused:
        shape_of("mine", config)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_local_folder_is_read_before_anything_else(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama"}))
    assert shape_of("x", read_config(str(tmp_path))).layers == 2


@pytest.mark.parametrize("suffix", ["", "-Instruct"])
def test_shipped_shapes_need_no_network(suffix, monkeypatch):
    monkeypatch.setattr("grpo_math.planner.model._download", None)
    assert read_config(f"Qwen/Qwen2.5-1.5B{suffix}")["hidden_size"] == 1536
    assert read_config("embedded")["hidden_size"] == 576


def test_the_embedded_models_shape_is_its_folders(smollm):
    assert shape_of("a", read_config("embedded")) == shape_of("b", read_config(smollm))


def test_a_model_that_cannot_be_had_is_one_line(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError) as refused:
        read_config("nobody/nothing-of-that-name")
    assert "\n" not in str(refused.value)
    assert "nobody/nothing-of-that-name" in str(refused.value)


@pytest.mark.parametrize("text", ["not json", "[]"])
def test_a_broken_config_is_one_line(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(str(tmp_path))


def test_a_folder_without_a_config_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_config(str(tmp_path))
