"""A run that is going: how far it is and how long it takes come first, and nothing that is not due yet is missed."""

from __future__ import annotations

import fcntl
import json

import pytest

from grpo_math.cli import main
from grpo_math.evaluation.figures import summary
from grpo_math.report import report
from grpo_math.report import watch as watching
from grpo_math.report.progress import Progress, progress, spent
from grpo_math.report.run_dir import Run

ROWS = [{"id": str(i), "completion": "", "category": "correct" if i < 3 else "bad_format"} for i in range(8)]
RESULTS = {"format": 1, "grader": 12, **summary(ROWS), "rows": ROWS, "seconds": 8}


def going(folder, steps=6, total=60):
    """The folder of a run in its seventh step, and its lock, which the caller holds."""
    lines = [{"step": s, "reward": 0.1, "step_time": 12.0, "seconds/generate": 9.0} for s in range(1, steps + 1)]
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 7, "rew')
    (folder / "config.yaml").write_text(f"max_steps: {total}\n")
    (folder / "before.json").write_text(json.dumps(RESULTS))
    lock = open(folder / ".lock", "a+")  # noqa: SIM115 - the caller closes it
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


@pytest.mark.slow
def test_the_page_of_a_run_that_is_going_begins_with_its_step_and_has_no_yellow_box(tmp_path):
    with going(tmp_path):
        files = report(tmp_path, reload=5)
        page = files.html.read_text()
        assert files.notes == []
        assert '<section class="notes">' not in page
        assert page.index("Step 6 of 60, about 11 min left") < page.index("37.5% accuracy before training")
        assert "80 s so far: generation 68%, other 22%, evaluation 10%." in page.replace(",\n", ", ")
        assert '<meta http-equiv="refresh" content="5">' in page
    page = report(tmp_path).html.read_text()  # the process has ended
    assert "Stopped at step 6 of 60" in page
    assert 'http-equiv="refresh"' not in page


@pytest.mark.full
def test_watching_ends_with_the_run(tmp_path, monkeypatch, capsys):
    lock, slept = going(tmp_path), []

    def sleep(seconds):
        slept.append(seconds)
        page = (tmp_path / "report.html").read_text()
        assert 'content="7"' in page
        if len(slept) == 1:
            with open(tmp_path / "history.jsonl", "a") as file:
                file.write('\n{"step": 8, "reward": 0.1, "step_time": 12.0}\n')
        else:
            lock.close()

    monkeypatch.setattr(watching.time, "sleep", sleep)
    files = watching.watch(tmp_path, 7)
    assert capsys.readouterr().err.splitlines() == [
        "step 6 of 60, about 11 min left",
        "step 8 of 60, about 10 min left",
    ]
    assert slept == [7, 7]
    assert 'http-equiv="refresh"' not in files.html.read_text()


@pytest.mark.parametrize(
    ("argv", "output"),
    [
        (["a", "b", "--watch"], "--watch would be ignored with several runs: leave it out"),
        (["a", "--output", "x.html"], "--output would be ignored with one run: leave it out"),
        (["a", "--watch", "0"], "watch=0 is not a number of seconds: give 1 or more"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(argv, output, capsys):
    assert main(["report", *argv]) == 2
    assert capsys.readouterr().err == f"error: {output}\n"


def test_the_steps_of_a_run_of_epochs_follow_from_its_epoch(tmp_path):
    history = [{"step": 10, "epoch": 0.5, "step_time": 3.0}]
    run = Run(tmp_path, config={"max_steps": -1, "num_train_epochs": 3.0}, history=history)
    assert progress(run) == Progress(10, 60, 150.0)
    assert progress(Run(tmp_path)) == Progress(0, None, None)
    assert spent(Run(tmp_path)) == {}
