"""Nothing grows with the steps: a run holds as much at its end as in its middle, and the kept log is cut."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from launching import TINY, run

from grpo_math.run.log import KEPT, Shortened

REWARD = """
import json, os, pathlib

def held(completions, trainer_state, **columns):
    with open("held.jsonl", "a") as file:
        names = {"files": "/proc/self/fd", "threads": "/proc/self/task"}
        counts = {name: len(os.listdir(folder)) for name, folder in names.items()}
        children = pathlib.Path("/proc/self/task").glob("*/children")
        counts["children"] = sum(len(path.read_text().split()) for path in children)
        counts["memory"] = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        file.write(json.dumps(counts) + "\\n")
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]
"""


@pytest.mark.full
def test_a_run_holds_no_more_files_threads_or_processes_at_its_end_than_in_its_middle(tiny, tmp_path):
    (tmp_path / "leaks.py").write_text(REWARD)
    command = [sys.executable, "-m", "grpo_math.train", "--model_name_or_path", tiny(), "--output_dir", "run", *TINY]
    command += ["--rewards", "accuracy", "leaks:held", "--max_steps=120", "--save_steps=20", "--save_total_limit=2"]
    run([*command, "--max_completion_length=4", "--eval_n=0", "--report_to=none"], cwd=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "held.jsonl").read_text().splitlines()]
    for name in ("files", "threads", "children"):
        last = [line[name] for line in lines[-25:]]  # a thread of a moment is not a leak
        assert min(last) <= max(line[name] for line in lines[:60]), name
    assert lines[-1]["memory"] - lines[60]["memory"] < 16 << 20


def test_the_log_that_a_trainer_keeps_is_cut():
    state = SimpleNamespace(log_history=list(range(KEPT + 5)))
    Shortened().on_step_end(None, state, None)
    assert state.log_history == list(range(5, KEPT + 5))
