"""A step that does not come: every rank prints where it waits, and nothing is ended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from launching import accelerate
from small_runs import PATH, RUN, start, until

from grpo_math.run.watchdog import Watchdog


@pytest.mark.full
def test_both_ranks_print_where_they_wait_and_the_run_goes_on(tiny, tmp_path):
    go, log = tmp_path / "go", tmp_path / "log"
    command = [*accelerate("multi_gpu", tmp_path, "--num_processes", "2"), "-m", "grpo_math.train"]
    command += ["--model_name_or_path", tiny(), "--output_dir", str(tmp_path / "run"), *RUN]
    command += ["--rewards", "faulty:hangs_on_one_rank", "--watchdog_minutes=0.1"]
    process = start(command, log, PYTHONPATH=PATH, GO=str(go), HANGS="1")
    until(lambda: log.read_text().count("Timeout (0:00:06)!") == 2, process, log)
    until(lambda: log.read_text().count("in training_step") >= 2, process, log)
    go.write_text("")
    assert process.wait(timeout=300) == 0, log.read_text()
    assert log.read_text().count("in hangs_on_one_rank") == 1


def test_a_stall_is_told_once_and_the_next_one_again(capfd):
    with Watchdog(0.002) as watchdog:
        time.sleep(0.5)  # several times as long as a stall
        watchdog.on_step_end(None, None, None)
        time.sleep(0.5)
    with Watchdog(0):
        time.sleep(0.2)
    output = capfd.readouterr().err
    assert output.count("Timeout (0:00:00.120000)!") == 2
    # faulthandler escapes letters of a path that are not ASCII.
    assert output.count(f'{Path(__file__).name}", line ') >= 2
