"""A step that does not come: every rank says where it waits, once, and nothing is ended."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from launching import ROOT, accelerate, variables
from small_runs import PATH, RUN

from grpo_math.run.watchdog import Watchdog


def wait_for(holds, alive=lambda: True):
    while not holds():
        assert alive()
        time.sleep(0.05)


def told(path: Path) -> list[str]:
    text = path.read_text() if path.exists() else ""
    return [line for line in text.splitlines() if line.startswith("watchdog: ")]


@pytest.mark.full
def test_both_ranks_say_where_they_wait_and_the_run_goes_on(tiny, tmp_path):
    folder, go, log = tmp_path / "run", tmp_path / "go", tmp_path / "log"
    command = [*accelerate("multi_gpu", tmp_path, "--num_processes", "2"), "-m", "grpo_math.train"]
    command += ["--model_name_or_path", tiny(), "--output_dir", str(folder), "--rewards", "faulty:hangs_on_one_rank"]
    command += [*RUN, "--watchdog_minutes=0.1"]
    environment = variables(PYTHONPATH=PATH, GO=str(go), HANGS="1")
    with open(log, "w") as file:
        run = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=file, stderr=file)

    def stalled(rank):
        return [line for line in told(log) if f"rank {rank}: no step for 0.1 minutes, since step 1;" in line]

    try:
        wait_for(lambda: stalled(0) and stalled(1), lambda: run.poll() is None)
        go.write_text("")
        assert run.wait(timeout=300) == 0, log.read_text()
    finally:
        run.kill()
    for rank in (0, 1):
        path = folder / f"stacks-rank{rank}.txt"
        (line,) = stalled(rank)
        assert str(path) in line
        stack = path.read_text()
        assert told(path) == [line.partition(";")[0]]
        assert "in _calculate_rewards" in stack
        assert "in training_step" in stack
        assert ("in hangs_on_one_rank" in stack) == (rank == 1)


@pytest.mark.slow
def test_a_stall_is_told_once_and_the_next_one_again(tmp_path):
    path = tmp_path / "made/stacks-rank0.txt"
    with Watchdog(tmp_path / "made", 0.002) as watchdog:
        wait_for(lambda: told(path))
        time.sleep(0.5)  # several times as long as a stall
        assert len(told(path)) == 1
        watchdog.again("since step 7")
        wait_for(lambda: len(told(path)) == 2)
    first, second = told(path)
    assert first == "watchdog: rank 0: no step for 0.002 minutes, since the start"
    assert f'"{__file__}", line ' in path.read_text()
    assert second.endswith("since step 7")
