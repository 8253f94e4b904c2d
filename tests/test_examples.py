"""The examples run as their first lines say, with a tiny model for a step."""

from __future__ import annotations

import json
import math
import sys

import pytest
from launching import ROOT, run


def test_the_script_trains_a_step_and_saves_an_adapter(tiny, tmp_path):
    options = ["--model", tiny(), "--max_steps", "1", "--output_dir", str(tmp_path / "run")]
    said = run([sys.executable, "examples/own_reward.py", *options], CUDA_VISIBLE_DEVICES="")
    assert "rewards/concise/mean" in said
    assert (tmp_path / "run/adapter_model.safetensors").exists()


def test_the_recipe_trains_a_step_with_the_function_beside_it(tiny, tmp_path):
    run_dir = tmp_path / "run"
    options = ["--model_name_or_path", tiny(), "--max_steps", "1", "--eval_n", "2", "--output_dir", str(run_dir)]
    command = [sys.executable, "-m", "grpo_math.cli", "train", "--config", "own_reward.yaml", *options]
    run(command, cwd=ROOT / "examples")
    (line,) = map(json.loads, (run_dir / "history.jsonl").read_text().splitlines())
    assert math.isfinite(line["rewards/concise/mean"])
    assert (run_dir / "after.json").exists()


@pytest.mark.parametrize(("answer", "reward"), [("7", 1.0), ("8", 0.0), ("", 0.0)])
def test_the_reward_is_what_its_docstring_says(answer, reward, monkeypatch):
    from grpo_math.grading import grade_batch

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from own_reward import concise

    completions = [f"#### {answer}", [{"role": "assistant", "content": f"#### {answer}"}]]
    grades = grade_batch(["7", "7"], [f"#### {answer}"] * 2)
    assert concise(completions=completions, grade=grades) == pytest.approx([reward] * 2, abs=0.03)
    assert concise(completions=["#### 7"], grade=grade_batch([""], ["#### 7"])) == [None]
