"""On a real GPU: ZeRO-2 with the optimizer in main memory, for which DeepSpeed compiles its Adam."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from small_runs import history

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
LIMIT = 220  # seconds


def test_zero2_with_offload_trains_on_one_gpu(model, rehearsal, tmp_path, figure):
    if rehearsal:
        pytest.skip("a process of its own has no pretended GPU")
    recipe = yaml.safe_load((ROOT / "launch/configs/gsm8k_8gb.yaml").read_text())
    recipe |= {"model_name_or_path": model, "dataset": "generated:sums", "output_dir": str(tmp_path / "run")}
    recipe |= {"max_steps": 2, "max_completion_length": 64, "eval_n": 0, "heldout_every": 0}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    launch = ["accelerate.commands.launch", "--config_file=accelerate_configs/zero2_offload.yaml", "--num_processes=1"]
    command = [sys.executable, "-m", *launch, "-m", "grpo_math.train", "--config", str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [step for step in history(tmp_path / "run") if "loss" in step]
    figure(says=f"a step of {steps[-1]['step_time']:.1f} s", steps=steps)
    assert len(steps) == 2
