"""Nothing grows with the steps: a short run of benchmarks/soak.py, and what it calls growth."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from benchmarks import soak

from grpo_math.run.log import KEPT, Shortened


@pytest.mark.full
def test_a_run_holds_no_more_files_threads_or_processes_at_its_end_than_in_its_middle(tmp_path):
    lines = soak.run(tmp_path, 120, 5, ["--max_completion_length=4", "--eval_n=0", "--save_steps=20"])
    assert lines[-1]["step"] >= 115
    assert not {name for name in soak.grown(lines) if not name.startswith("memory")}, lines
    for name in ("open files", "threads", "children", "temporary files", "shared memory"):
        last = [line[name] for line in lines[-5:]]  # a thread of a moment is not a leak
        assert min(last) <= max(line[name] for line in lines[: len(lines) // 2]), name
    second, _, last = soak.quarters(lines, "memory")
    assert last - second < 16 << 20  # a leak of a page a step would not show: the long run is for that


def test_the_log_that_a_trainer_keeps_is_cut():
    state = SimpleNamespace(log_history=list(range(KEPT + 5)))
    Shortened().on_step_end(None, state, None)
    assert state.log_history == list(range(5, KEPT + 5))
