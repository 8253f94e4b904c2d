"""A rank that is killed: the others end, in one line, whatever they were doing; what was saved is whole."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from launching import ROOT, variables
from safetensors.torch import load_file
from small_runs import history, rank, settings, start, steps_done, two, until
from waiting import alive
from waiting import until as wait_until

from grpo_math.run.machine import free_port
from grpo_math.run.signals import GONE

LINE = "was killed or has crashed, and the others cannot go on without it: the same command continues from checkpoint-"


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
    (line,) = [line for line in output.splitlines() if "error:" in line]
    assert line.startswith("error: rank 1 (process ")
    last = line.partition(LINE)[2].split()[0]
    assert load_file(run_dir / f"checkpoint-{last}/adapter_model.safetensors")
    wait_until(lambda: not alive(str(run_dir)))
    process = start(command, log)
    assert process.wait(300) == 0, log.read_text()[-4000:]
    assert [line["step"] for line in history(run_dir)] == list(range(1, 21))


# Ranks without an agent over them, as mpirun or srun may start them. The first waits outside of Python, as a rank does
# in a collective over NCCL: no signal handler runs there.
RANKS = """
import ctypes, os, time
from accelerate import PartialState
from grpo_math.run.peers import Peers
from grpo_math.run.signals import Stop
peers = Peers()
with Stop(too_late=peers.broken):
    PartialState(cpu=True)
    peers.watch(lambda: "ADVICE")
    if os.environ["RANK"] == "1":
        time.sleep(1)
        os.kill(os.getpid(), 9)
    ctypes.CDLL(None).sleep(600)
"""


@pytest.mark.full
def test_a_rank_that_waits_outside_of_python_ends_too():
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    one, other = (
        subprocess.Popen(
            [sys.executable, "-c", RANKS],
            env=variables(**alone, RANK=rank, LOCAL_RANK=rank),
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    )
    try:
        _, err = one.communicate(timeout=120)
    finally:
        one.kill()
        other.kill()
        other.communicate()
    assert one.returncode == GONE
    assert f"error: rank 1 (process {other.pid}) was killed or has crashed" in err
    assert "ADVICE" in err
