"""A simulated run of small models against what is counted, and `grpo-math plan --simulate`.

Each simulation is a process of its own and takes some ten seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_math import cli
from grpo_math.errors import UserError
from grpo_math.planner import plan, simulate, words

QWEN = {
    "model_type": "qwen2",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32768,
    "tie_word_embeddings": True,
}
UNKNOWN = {**QWEN, "model_type": "olmo2"}  # the counted plan has no formula for it
RECIPE = {
    "dtype": "bfloat16",
    "dataset": "gsm8k",
    "template": "gsm8k",
    "rewards": ["gsm8k"],
    "prompts_per_step": 4,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 400,
    "use_vllm": True,
    "vllm_mode": "server",
}
LORA = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0}
KINDS = {
    "lora": LORA,
    "4 bit": {**LORA, "load_in_4bit": True, "use_bnb_nested_quant": True, "optim": "paged_adamw_8bit"},
    "full": {"dtype": "float32"},
}


def written(folder: Path, config: dict[str, Any], **settings: Any) -> tuple[str, dict[str, Any]]:
    """A recipe of a model that is a config.json alone: its file, and its settings."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(config))
    recipe = {"model_name_or_path": str(folder / "model"), **RECIPE, **settings}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return str(folder / "recipe.yaml"), recipe


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_on_the_gpu_all_the_time_is_what_the_plan_counts(kind, tmp_path):
    if kind == "4 bit":
        pytest.importorskip("bitsandbytes")
    path, recipe = written(tmp_path, QWEN, **KINDS[kind])
    found = simulate(path, prompt_tokens=256)
    terms = plan(recipe, gpus=2, gpu_gb=80, cpu_gb=64, prompt_tokens=256)["phases"]["training"]
    stored = {name: terms.get(name, 0) for name in ("gradients", "adapter", "optimizer")}
    kinds, live, reserved = found["kinds"], found["training"]["live"], found["training"]["reserved"]
    weights = terms["base_weights"] + terms.get("unquantised_weights", 0)
    assert kinds["weights"] == pytest.approx(weights, rel=0.01)
    assert kinds.get("adapter", 0) == pytest.approx(stored["adapter"], rel=0.001)
    if kind == "full":
        assert kinds["optimizer state"] == pytest.approx(stored["optimizer"], rel=0.001)
        assert kinds["gradients"] == pytest.approx(stored["gradients"], rel=0.001)
    assert weights + sum(stored.values()) < live < reserved


@pytest.mark.slow
def test_a_family_that_is_not_counted_is_simulated_with_its_generation(tmp_path, capsys):
    path, recipe = written(tmp_path, UNKNOWN, **LORA, use_vllm=False)
    with pytest.raises(UserError, match="olmo2"):
        plan(recipe, gpus=1, gpu_gb=80)
    asked = ["plan", "--config", path, "--simulate", "--json", "--prompt-tokens", "100", "--gpu-memory"]
    assert cli.main([*asked, "80"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is True
    assert set(answer["phases"]) == {"generation", "scoring", "forward", "backward", "optimizer"}
    assert len(answer["largest"]) == 10
    assert any("modeling_olmo2.py" in tensor["line"] for tensor in answer["largest"])
    keys_and_values = 2 * 4 * 4 * 64 * 2 * 16 * (100 + 400)  # K and V, layers, heads, width, bytes, rows, tokens
    assert answer["phases"]["generation"]["live"] > answer["kinds"]["weights"] + keys_and_values
    assert "the largest tensors there" in words(answer)


def test_what_is_not_simulated_is_refused_in_one_line(tmp_path, capsys):
    path, _ = written(tmp_path, QWEN)
    for option, value in (("--gpus", "2"), ("--cpu-memory", "8"), ("--accelerate-config", path)):
        assert cli.main(["plan", "--config", path, "--simulate", option, value]) == 2
        assert "is not simulated" in capsys.readouterr().err
    assert cli.main(["plan", "--table", "--simulate"]) == 2


@pytest.mark.slow
def test_a_recipe_that_is_wrong_is_refused_by_the_simulation_in_one_line(tmp_path):
    path, _ = written(tmp_path, QWEN, use_cpu=True)
    with pytest.raises(UserError, match="use_cpu=True is not simulated"):
        simulate(path)
