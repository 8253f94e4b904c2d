"""On a real GPU: the demo of the README, in float32, as on a CPU."""

import json
import time
from pathlib import Path

import pytest

from grpo_math.train.program import main as train

pytestmark = pytest.mark.gpu
RECIPE = Path(__file__).parents[2] / "launch/configs/demo_cpu.yaml"
SHORT = ["--max_steps=1", "--eval_n=2", "--heldout_every=0", "--max_completion_length=8"]


def test_the_demo_learns_as_on_a_cpu(model, rehearsal, tmp_path, figure):
    """README: from 4.3% to 81.6%. Other kernels round differently, so that a run differs, and so does its end."""
    fields = ["--use_cpu=false", f"--output_dir={tmp_path / 'run'}", f"--model_name_or_path={model}"]
    started = time.perf_counter()
    assert train(["--config", str(RECIPE), *fields, *(SHORT if rehearsal else [])]) == 0
    seconds = time.perf_counter() - started
    before, after = (
        json.loads((tmp_path / f"run/{name}.json").read_text())["accuracy"] for name in ("before", "after")
    )
    figure(says=f"{before:.1%} to {after:.1%} in {seconds:.0f} s", before=before, after=after, seconds=seconds)
    assert rehearsal or (before < 0.1 and after > 0.6)
