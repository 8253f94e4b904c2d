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

from grpo_math.cli import main
from grpo_math.planner import calibrate, calibration
from grpo_math.planner.model import read_config

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
def test_a_calibration_measures_the_plan_of_each_phase_and_later_plans_use_it(
    kind, recipe, rehearsal, tmp_path, monkeypatch, capfd, figure
):
    """The largest micro-batch is tried before the first step, so that two steps show the peak."""
    recipe |= KINDS[kind]
    if rehearsal:  # the process that measures has the pretended GPU, too, and only nvidia-smi lists a GPU
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "gpu_like/site"))
        # This process uses the GPU, as it does on a real one.
        nvidia_smi(tmp_path / "bin", "0, GPU-1, 143360, 1\\n", f"GPU-1, {os.getpid()}", more=", pretended GPU, 9.0")
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        recipe |= {"per_device_train_batch_size": 2, "num_generations": 2, "gradient_accumulation_steps": 1}
        monkeypatch.setattr(calibrate, "SECONDS", 600)  # on a CPU
    monkeypatch.setattr(calibration, "cache_dir", lambda: tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = ["plan", "--config", str(tmp_path / "recipe.yaml"), "--gpus", "1", "--json"]
    main([*command, "--calibrate"])
    calibrated = json.loads(capfd.readouterr().out)
    main(command)
    assert json.loads(capfd.readouterr().out) == calibrated
    assert calibrated["seconds"]["assumed"].startswith("measured on this card on ")
    for low, high in calibrated["seconds"]["ranges"].values():
        assert 0 < low < high <= 1.5 * low
    rows = {name: (planned, measured) for name, planned, measured in calibrated["calibration"]["rows"]}
    says = "; ".join(f"{name} {measured} (plan {planned})" for name, (planned, measured) in rows.items())
    figure(says=f"{kind}: {says}", **{**calibrated["calibration"], "recipe": RECIPE.stem, "kind": kind})
    in_gb = {name: pair for name, pair in rows.items() if " GB " in name}
    assert len(in_gb) == 4
    for planned, measured in in_gb.values():
        assert rehearsal or 0.92 <= float(planned) / float(measured) <= 1.08
