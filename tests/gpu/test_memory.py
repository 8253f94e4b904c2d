"""On a real GPU: what a run holds at most, against what the plan says beforehand.

The pretended GPU counts no memory: a rehearsal shows that the test runs. gpu_like/test_simulation.py checks the plan.
"""

from pathlib import Path

import pytest
import yaml
from small_runs import history

from grpo_math.planner import plan
from grpo_math.run.machine import GB
from grpo_math.train.program import main as train

pytestmark = pytest.mark.gpu
RECIPE = Path(__file__).parents[2] / "launch/configs/gsm8k_8gb.yaml"
KINDS = {
    "lora": {},
    "lora, more rows": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
    "full": {"use_peft": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_of_a_run_is_within_its_plan(kind, model, rehearsal, tmp_path, figure):
    """The largest micro-batch is tried before the first step, so that two steps show the peak."""
    recipe = yaml.safe_load(RECIPE.read_text())
    recipe |= {
        "model_name_or_path": model,
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
    assert planned["peak_gb"] >= peaks["allocated"], "a plan that says yes, and a GPU that runs out"
