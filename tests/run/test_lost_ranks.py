"""A rank that is killed: the others end, with a line that names it; what was saved is whole."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest
from launching import ROOT, variables
from safetensors.torch import load_file
from small_runs import history, rank, settings, start, steps_done, two, until
from waiting import alive
from waiting import until as wait_until

# The first rank waits as one does in a collective over NCCL: no signal handler of Python runs there.
RANKS = """
import ctypes, os, pathlib, signal, time
if os.environ["RANK"] == "1":
    time.sleep(1)
    pathlib.Path("{killed}").write_text(str(time.time()))
    os.kill(os.getpid(), 9)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ctypes.CDLL(None).sleep(600)
"""


@pytest.mark.full
def test_the_others_end_with_a_line_and_the_run_goes_on_from_its_checkpoint(tiny, tmp_path):
    pytest.importorskip("deepspeed")
    run_dir, log = tmp_path / "run", tmp_path / "log"
    more = ("--save_strategy=steps", "--save_steps=2", "--ddp_backend=gloo", "--max_steps=20")
    command = [*two(tmp_path, "grpo_math.train.ranks", "zero2"), *settings(tiny, run_dir, *more)]
    process = start(command, log)
    until(lambda: steps_done(run_dir, 3), process, log)
    rank(process, 1).kill()
    assert process.wait(60) == 128 + signal.SIGKILL
    output = log.read_text()
    assert "Traceback" not in output
    assert "ChildFailedError" not in output
    assert "error: another rank does not answer (" in output
    assert "error: rank 1 (process " in output
    last = output.partition("the same command continues from checkpoint-")[2].split()[0]
    assert load_file(run_dir / f"checkpoint-{last}/adapter_model.safetensors")
    wait_until(lambda: not alive(str(run_dir)))
    process = start(command, log)
    assert process.wait(300) == 0, log.read_text()[-4000:]
    assert [line["step"] for line in history(run_dir)] == list(range(1, 21))


@pytest.mark.full
def test_a_rank_that_waits_outside_of_python_is_ended_within_ten_seconds(tmp_path):
    (tmp_path / "waits.py").write_text(RANKS.format(killed=tmp_path / "killed"))
    command = [*two(tmp_path, "grpo_math.train.ranks")[:-2], "-m", "waits"]
    environment = variables(PYTHONPATH=f"{ROOT}:{tmp_path}")
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert time.time() - float((tmp_path / "killed").read_text()) < 10
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: rank 1 (process ")
    assert " was ended by SIGKILL " in line
    assert done.returncode == 128 + signal.SIGKILL
