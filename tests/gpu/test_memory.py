"""On a real GPU: the peak of a run against its plan, on random weights of the size that the recipe names.

The pretended GPU counts no memory: a rehearsal shows that the test runs. gpu_like/test_simulation.py checks the plan.
"""

from pathlib import Path

import pytest
import torch
import yaml
from small_runs import history
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_math.planner import plan
from grpo_math.planner.model import read_config
from grpo_math.system.machine import GB
from grpo_math.train.program import main as train

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


@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_of_a_run_is_within_its_plan(kind, full_size, rehearsal, tmp_path, figure):
    """The largest micro-batch is tried before the first step, so that two steps show the peak."""
    recipe = yaml.safe_load(RECIPE.read_text())
    recipe |= {
        "model_name_or_path": full_size,
        "dataset": "generated:sums",
        "output_dir": str(tmp_path / "run"),
        "max_steps": 2,
        "max_completion_length": 8 if rehearsal else 512,
        "eval_n": 0,
        "heldout_every": 0,
        **KINDS[kind],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    planned = plan(recipe, gpus=1, gpu_gb=80)
    assert train(["--config", str(tmp_path / "recipe.yaml")]) == 0
    steps = history(tmp_path / "run")
    peaks = {name: max(step.get(f"memory/{name}", 0) for step in steps) / GB for name in ("allocated", "reserved")}
    figure(kind=kind, measured_gb=peaks, planned_gb=planned["peak_gb"])
    assert planned["peak_gb"] >= peaks["allocated"], "the plan says that it fits, and the GPU runs out of memory"
    if not rehearsal:
        # Reserved memory includes what the allocator cannot use.
        assert 0.92 <= planned["peak_gb"] / peaks["reserved"] <= 1.08
