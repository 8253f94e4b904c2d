"""The synthetic run that the tests of the report read."""

import json

import pytest
from small_model import script, small
from synthetic_run import FIVE_STEPS, RIGHT_AFTER, RIGHT_BEFORE, results, write_completions

from grpo_math.report import page

__all__ = ["script", "small"]


SVGS = {}


@pytest.fixture(autouse=True)
def quick_to_draw(monkeypatch):
    """Draw each plot of a page once, and none as PNG: drawing is most of a report's time. test_plots.py draws."""
    svg = page.svg
    monkeypatch.setattr(page, "png", lambda drawn: b"")
    monkeypatch.setattr(page, "svg", lambda *drawn: SVGS.get(repr(drawn)) or SVGS.setdefault(repr(drawn), svg(*drawn)))


@pytest.fixture
def run(tmp_path):
    """A finished run: 94 of 256 right before, 190 after, of which 110 are gained and 14 lost."""
    path = tmp_path / "demo"
    path.mkdir()
    (path / "before.json").write_text(json.dumps(results(RIGHT_BEFORE)))
    (path / "after.json").write_text(json.dumps(results(RIGHT_AFTER, seed=1, adapter="adapter")))
    (path / "history.jsonl").write_text(FIVE_STEPS)
    (path / "config.yaml").write_text(
        "model_name_or_path: org/SmolLM2-135M-Instruct\nseed: 3\nsave_steps: 20.0\n"
        "learning_rate: 0.0003\nbaseline: group_mean\nhub_token: hf_verysecret\n"
        "peft: {r: 16, targets: [q_proj, v_proj]}\ndistributed_type: 'NO'\nnum_processes: 1\n"
        "command: grpo-math demo\nversions: {trl: 1.16.0, torch: 2.9.0}\n"
    )
    write_completions(path, range(10, 81, 10))
    return path
