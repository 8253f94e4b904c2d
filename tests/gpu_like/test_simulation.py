"""The plan against a simulated run of a small model, which is a process of its own and takes fifteen seconds.

tests/benchmarks/plans.md has simulations of the other kinds; test_simulated_table.py compares the plans with it.
"""

import json

import pytest
import yaml
from benchmarks.simulate import simulate

from grpo_math.planner import plan
from grpo_math.planner.memory import CONTEXT
from grpo_math.settings.run_settings import RunSettings

MODEL = {
    "model_type": "olmo2",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32768,
    "tie_word_embeddings": True,
}
RECIPE = {
    "dtype": "bfloat16",
    "dataset": "gsm8k",
    "prompt_template": "gsm8k",
    "rewards": ["gsm8k"],
    "prompts_per_step": 4,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 400,
    "use_peft": True,
    "lora_target_modules": "all-linear",
    "lora_dropout": 0.0,
}


@pytest.mark.full
def test_the_plan_says_what_is_live_and_what_is_reserved(tmp_path):
    """Also of another row than the one that was measured."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))  # a model that is a config.json alone
    recipe = {"model_name_or_path": str(tmp_path), **RECIPE}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    simulated = simulate(str(tmp_path / "recipe.yaml"), prompt_tokens=256)
    phases = plan(RunSettings(recipe), gpus=1, gpu_gb=80, cpu_gb=64, prompt_tokens=256)["phases"]
    for phase, tolerance in (("training", 0.002), ("generation", 0.04)):
        terms = phases[phase]
        counted = sum(terms.values()) - terms["CUDA_context"] - terms["fragmentation"]
        assert counted == pytest.approx(simulated["live"][phase], rel=tolerance)
    fuller = max(sum(terms.values()) for terms in phases.values())
    # As docs/scaling.md says of whole models.
    assert 0.98 <= (fuller - CONTEXT) / simulated["reserved"] <= 1.06
