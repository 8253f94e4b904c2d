"""config.json -> shapes: known models to the parameter, measured families against transformers, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_math.checks.model import check_targets
from grpo_math.errors import ConfigError, UserError
from grpo_math.planner.model import _worker, read_config, shape_of, stored

PARAMETERS = json.loads((Path(__file__).parents[1] / "cases/model_parameters.json").read_text())
SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def test_each_shipped_shape_has_the_published_number_of_parameters():
    assert {name: shape_of(name, config).total for name, config in stored("shapes.json").items()} == PARAMETERS


@pytest.mark.full
@pytest.mark.parametrize("family", ["olmo2", "mixtral"])
def test_a_family_is_measured_once_and_exact(family, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GRPO_MATH_CACHE", str(tmp_path))
    _worker.cache_clear()  # the line is printed when the measuring process starts
    config = {**SMALL, "model_type": family, "head_dim": 12}
    with torch.device("meta"):
        fields = {name: value for name, value in config.items() if name != "model_type"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
    assert shape_of(family, config).total == sum(p.numel() for p in model.parameters())
    assert "measuring" in capsys.readouterr().err
    monkeypatch.setattr("grpo_math.planner.model._ask", None)
    assert shape_of(family, config).layers == 2


@pytest.mark.parametrize(
    ("config", "says"),
    [({}, "model_type"), ({**SMALL, "model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "gptq")],
)
def test_what_is_not_known_is_refused_by_name(config, says):
    with pytest.raises(ConfigError) as refused:
        shape_of("mine", config)
    assert says in str(refused.value)


def test_a_name_that_no_linear_map_has_is_refused():
    shape = shape_of("q", stored("shapes.json")["Qwen/Qwen2.5-0.5B"])
    for modules in (["q_proj", "query"], "query"):
        with pytest.raises(ConfigError, match="lora_target_modules='query'"):
            check_targets(shape.paths, modules, [])
    for right in (None, "all-linear", ["q_proj", "up_proj"], r".*\.mlp\..*_proj"):
        check_targets(shape.paths, right, [])


@pytest.mark.parametrize(("text", "named"), [("not json", r"config\.json"), (None, r"has no config\.json")])
def test_a_config_that_cannot_be_had_is_one_line(text, named, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if text:
        (tmp_path / "config.json").write_text(text)
    for name, message in ((str(tmp_path), named), ("nobody/nothing-of-that-name", "nobody/nothing-of-that-name")):
        with pytest.raises(UserError, match=message) as refused:
            read_config(name)
        assert "\n" not in str(refused.value)
