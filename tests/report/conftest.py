"""The synthetic run that the tests of the report read."""

import json

import pytest
from small_model import script, small
from synthetic_run import RIGHT_AFTER, RIGHT_BEFORE, history, results, write_completions

__all__ = ["script", "small"]


@pytest.fixture
def whole_run(tmp_path):
    """A finished run: 94 of 256 right before, 190 after, of which 110 are gained and 14 lost."""
    path = tmp_path / "demo"
    path.mkdir()
    (path / "before.json").write_text(json.dumps(results(RIGHT_BEFORE)))
    (path / "after.json").write_text(json.dumps(results(RIGHT_AFTER, seed=1, adapter="adapter")))
    (path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history()))
    (path / "config.yaml").write_text(
        "model_name_or_path: org/SmolLM2-135M-Instruct\nseed: 3\nlearning_rate: 0.0003\nbaseline: group_mean\n"
        "hub_token: hf_verysecret\npeft: {r: 16, targets: [q_proj, v_proj]}\ndistributed_type: 'NO'\nnum_processes: 1\n"
        "command: grpo-math demo\nversions: {trl: 1.16.0, torch: 2.9.0}\n"
    )
    write_completions(path, range(10, 81, 10))
    return path


@pytest.fixture
def run(whole_run):
    """The whole run with five steps of two metrics, which is quick to draw."""
    lines = [{"step": step, "reward": 0.1 * step, "loss": 0.0} for step in range(1, 6)]
    (whole_run / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return whole_run
