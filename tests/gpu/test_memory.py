"""On a real GPU: the peak of a run against its plan, on random weights of the size that the recipe names.

The pretended GPU counts no memory: a rehearsal shows that the test runs. gpu_like/test_simulation.py checks the plan.
"""

import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from launching import nvidia_smi
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_math.planner.model import read_config
from grpo_math.train.program import main

pytestmark = pytest.mark.gpu
RECIPE = Path(__file__).parents[2] / "launch/configs/gsm8k_8gb.yaml"
KINDS = {
    "lora": {},
    "lora, more rows": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
    "full": {"use_peft": False},
}


@pytest.fixture(scope="module")
def full_size(model, rehearsal, tokenizer, tmp_path_factory):
    """Save random weights of the recipe's model. Memory depends on shapes alone."""
    if rehearsal:
        return model
    folder = str(tmp_path_factory.mktemp("full size"))
    fields = dict(read_config(yaml.safe_load(RECIPE.read_text())["model_name_or_path"]))
    shape = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)
    torch.cuda.empty_cache()
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(full_size, rehearsal, tmp_path):
    """The recipe of 8 GB, on problems that need no Hub, for two steps without evaluations."""
    return yaml.safe_load(RECIPE.read_text()) | {
        "model_name_or_path": full_size,
        "dataset": "generated:sums",
        "output_dir": str(tmp_path / "run"),
        "max_steps": 2,
        "max_completion_length": 8 if rehearsal else 512,
        "eval_n": 0,
        "heldout_every": 0,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_measurement_agrees_with_the_plan_of_each_phase(
    kind, recipe, rehearsal, tmp_path, monkeypatch, capfd, figure
):
    """The largest micro-batch is tried before the first step, so that two rollouts show the peak."""
    recipe |= KINDS[kind]
    if rehearsal:  # only nvidia-smi lists a GPU
        nvidia_smi(tmp_path / "bin", "0, GPU-1, 143360, 0, 9.0\\n")
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        recipe |= {"per_device_train_batch_size": 2, "num_generations": 2, "gradient_accumulation_steps": 1}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["--config", str(tmp_path / "recipe.yaml"), "--measure"], as_json=True) == 0
    answer = json.loads(capfd.readouterr().out)
    gb = {phase: (peak["measured_gb"], peak["planned_gb"]) for phase, peak in answer["memory"].items()}
    parts = [f"{phase} {measured:.2f} GB (plan {planned:.2f})" for phase, (measured, planned) in gb.items()]
    seconds = "a rollout {rollout:.1f} s, an update {update:.1f} s".format(**answer["seconds"])
    figure(says=f"{kind}: {'; '.join(parts)}; {seconds}", **answer, recipe=RECIPE.stem, kind=kind)
    for measured, planned in gb.values():
        assert rehearsal or 0.92 <= planned / measured <= 1.08
