"""config.json -> shapes: known models to the parameter, measured families against transformers, and what is refused."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_math.errors import UserError
from grpo_math.planner.model import _worker, measured, model_shape, read_config, stored
from grpo_math.planner.settings import NotPlanned


def test_each_shipped_shape_has_the_published_number_of_parameters():
    assert {name: model_shape(name, config).total for name, config in stored("shapes.json").items()} == json.loads(
        (Path(__file__).parents[1] / "cases/model_parameters.json").read_text()
    )


@pytest.mark.full
def test_a_family_is_measured_exactly(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GRPO_MATH_CACHE", str(tmp_path))
    _worker.cache_clear()  # the line is printed when the measuring process starts
    config = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "model_type": "mixtral",
        "head_dim": 12,
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert model_shape("mine", config).total == sum(p.numel() for p in model.parameters())
    assert "measuring" in capsys.readouterr().err


def test_an_answer_of_the_measuring_process_is_kept_unless_it_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_MATH_CACHE", str(tmp_path))
    ask = Mock(side_effect=[{"layers": 2}, {"error": "KeyError: no"}])
    assert [measured("mine", {"hidden_size": 8}, None, ask) for _ in (1, 2)] == [{"layers": 2}] * 2
    with pytest.raises(NotPlanned, match=r"'mine' cannot be measured \(KeyError: no\)"):
        measured("mine", {}, None, ask)


@pytest.mark.parametrize(("text", "error"), [("not json", r"config\.json"), (None, r"has no config\.json")])
def test_a_folder_without_a_config_that_can_be_read_is_an_error(text, error, tmp_path):
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=error):
        read_config(str(tmp_path))
