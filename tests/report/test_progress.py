"""The page of a run that is under way: its step and the time left come first, and nothing that is not due is missed."""

from __future__ import annotations

import fcntl
import json

import pytest

from grpo_math.evaluation.figures import summary
from grpo_math.report import report
from grpo_math.report.progress import Progress, progress
from grpo_math.report.run_dir import Run

ROWS = [{"id": str(i), "completion": "", "category": "correct" if i < 3 else "bad_format"} for i in range(8)]
RESULTS = {"format": 1, "grader": 12, **summary(ROWS), "rows": ROWS, "seconds": 8}


@pytest.mark.slow
def test_the_page_of_a_run_that_is_going_begins_with_its_step_and_has_no_yellow_box(tmp_path):
    lines = [{"step": s, "reward": 0.1, "step_time": 12.0, "seconds/generate": 9.0} for s in range(1, 7)]
    half_a_line = '{"step": 7, "rew'
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + half_a_line)
    (tmp_path / "config.yaml").write_text("max_steps: 60\n")
    (tmp_path / "before.json").write_text(json.dumps(RESULTS))
    with open(tmp_path / ".lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        files = report(tmp_path)
    page = files.html.read_text()
    assert files.notes == []
    assert page.index("Step 6 of 60, about 11 min left") < page.index("37.5% accuracy before training")
    assert "80 s so far: generation 68%, other 22%, evaluation 10%." in page.replace(",\n", ", ")
    assert "Stopped at step 6 of 60" in report(tmp_path).html.read_text()  # the process has ended


def test_the_steps_of_a_run_of_epochs_follow_from_its_epoch(tmp_path):
    history = [{"step": 10, "epoch": 0.5, "step_time": 3.0}]
    run = Run(tmp_path, config={"max_steps": -1, "num_train_epochs": 3.0}, history=history)
    assert progress(run) == Progress(10, 60, 150.0)
    assert progress(Run(tmp_path)) == Progress(0, None, None)
