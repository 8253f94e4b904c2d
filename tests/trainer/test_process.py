"""A library call leaves the process of its caller as it was: variables, folder, locale, signals, threads, warnings."""

import json
import subprocess
import sys

import pytest
from launching import ROOT, variables
from process_state import process_state
from small_trainers import letters

import grpo_math
from grpo_math.settings.recipe import read


@pytest.mark.slow
def test_an_import_changes_nothing_in_the_process():
    # A program, because packages are imported once. What they change themselves comes first.
    program = f"""
import json, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from process_state import process_state
import torch, transformers, trl, peft, datasets, pandas
import trl.trainer.grpo_trainer, transformers.trainer

before = process_state()
import grpo_math
for name in grpo_math.__all__:
    getattr(grpo_math, name)
import grpo_math.trainer.console, grpo_math.report, grpo_math.planner, grpo_math.checks, grpo_math.settings.recipe
print(json.dumps([before, process_state()]))
"""
    done = subprocess.run([sys.executable, "-c", program], env=variables(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert after == before


def test_a_call_changes_nothing_in_the_process(ours, small, tmp_path):
    rows = [{"prompt": f"What is {i} + 1?", "solution": str(i + 1)} for i in range(8)]
    (tmp_path / "recipe.yaml").write_text("env: {OMP_NUM_THREADS: 7, MINE: x}\nuse_peft: true\n")
    calls = {
        "read": lambda: read(["--config", str(tmp_path / "recipe.yaml")]),
        "grade": lambda: grpo_math.grade("4", "The answer is $4$."),
        "load_problems": lambda: grpo_math.load_problems("generated:sums", limit=4),
        "rewards": lambda: grpo_math.REWARDS["accuracy"](prompts=["2 + 2?"], completions=["#### 4"], answer=["4"]),
        "train": lambda: ours(letters, rows, max_steps=1).train(),
        "evaluate": lambda: grpo_math.evaluate(small, rows[:2], progress=False, max_new_tokens=4),
    }
    for name, call in calls.items():
        before = process_state()
        call()
        assert process_state() == before, name
