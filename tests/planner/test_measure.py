"""What measure.py answers: the shipped measurements anew, and layers that were not among what it measured."""

import contextlib
import io
import json

import pytest
import torch
from small_families import tiny_model

from grpo_math.packing import attention, varlen
from grpo_math.planner import measure, model, plan
from grpo_math.planner.memory import Precision, measurement_settings
from grpo_math.planner.settings import NotPlanned, resolve
from grpo_math.settings.run_settings import RunSettings

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
HALF = Precision(2, 4, True)
LORA = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0}


@pytest.fixture
def measuring(monkeypatch):
    """Answers of the measuring process, made in this one."""
    replaced = [(torch.nn.Module, "_apply"), (torch.nn.functional, "dropout"), (attention, "on_cpu")]
    for owner, name in (*replaced, (varlen, "flash_takes"), (varlen, "varlen_attn")):
        monkeypatch.setattr(owner, name, getattr(owner, name))

    def answers(*requests):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(map(json.dumps, requests))))
        with contextlib.redirect_stdout(io.StringIO()) as output:
            measure.main()
        return [json.loads(line) for line in output.getvalue().splitlines()]

    return answers


def how(fields, precise=HALF, tiles=1):
    return measurement_settings(None, resolve(RunSettings(fields)), precise, tiles)


@pytest.mark.parametrize(
    "settings",
    [
        None,
        how({**LORA, "gradient_checkpointing": False}),
        pytest.param(how({"gradient_checkpointing": False}, Precision(2, 2, False)), marks=pytest.mark.slow),
        pytest.param(how({**LORA, "lora_dropout": 0.05}, tiles=4), marks=pytest.mark.slow),
    ],
)
def test_the_shipped_measurements_are_what_is_measured_now(settings, measuring):
    """After a change that is meant: python tests/benchmarks/measurements.py."""
    request = model.stored("shapes.json")["Qwen/Qwen2.5-0.5B"], settings
    assert measuring(request) == [model.stored("measured.json")[model.measurement_key(*request)]]


def test_what_cannot_be_measured_is_answered_by_the_reason(measuring):
    chunked = {"model_type": "qwen2", **SMALL, "layer_types": ["chunked_attention"] * 2}
    errors = [answer["error"] for answer in measuring(({}, None), (chunked, None))]
    assert "model_type" in errors[0]
    assert "layers of type 'chunked_attention'" in errors[1]


@pytest.mark.slow
def test_a_rope_that_reads_the_length_of_a_pass_is_planned_for_the_lengths_that_are_packed(
    measuring, monkeypatch, tmp_path
):
    monkeypatch.setenv("GRPO_MATH_CACHE", str(tmp_path))
    monkeypatch.setattr(model, "measure_now", lambda source, config, how: measuring((config, how))[0])
    rope = {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    lengths = {"max_position_embeddings": 8192, "original_max_position_embeddings": 1024}
    config = {"model_type": "phi3", **SMALL, **lengths, "vocab_size": 32064, "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe = RunSettings({"model_name_or_path": str(tmp_path), **LORA, "dtype": "bfloat16"})
    machine = {"gpus": 1, "gpu_gb": 24, "cpu_gb": 64}
    assert plan(recipe.changed(max_completion_length=511), **machine)["fits"]
    with pytest.raises(NotPlanned, match=r"max_completion_length=512 .* is not packed, .*: use less than 512"):
        plan(recipe.changed(max_completion_length=512), **machine)


def test_a_token_goes_through_two_of_four_experts(measuring):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    (answer,) = measuring(({"model_type": "mixtral", **SMALL, **experts}, None))
    # Two layers, two experts that stand idle, three matrices.
    assert answer["total"] - answer["active"] == 2 * 2 * 3 * 256 * 768


@pytest.mark.slow
def test_a_model_that_sees_is_measured_whole(measuring, tmp_path):
    whole = tiny_model("qwen3_5")
    whole.save_pretrained(tmp_path)
    (answer,) = measuring((model.shape_fields(model.read_config(str(tmp_path))), None))
    assert answer["total"] == whole.num_parameters()
    assert {"model.visual.blocks.0.attn.qkv", "model.language_model.layers.0.self_attn.q_proj"} <= {*answer["paths"]}


@pytest.mark.full
def test_a_layer_represents_the_later_ones_of_its_kind(measuring, monkeypatch):
    """Two kinds of layers in an order that is no period, measured by five of them and by all."""
    kinds = ["sliding_attention", "full_attention", "full_attention", *["sliding_attention"] * 3]
    config = {"model_type": "gemma3_text", **SMALL, "head_dim": 64, "sliding_window": 256, "layer_types": kinds}
    request = config | {"num_hidden_layers": len(kinds)}, how({**LORA, "gradient_checkpointing": False})
    some = measuring(request)
    monkeypatch.setattr(measure, "reduced_model", lambda config: (None, config, [1] * len(kinds)))
    assert measuring(request) == some
