"""A rank that is killed: the others end, in one line, whatever they were doing; what was saved is whole."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from launching import ROOT, variables
from safetensors.torch import load_file
from small_runs import STEPS, history, rank, settings, start, steps_done, two, until
from waiting import alive

from grpo_math.run.machine import free_port
from grpo_math.run.signals import GONE

LINE = "was killed or has crashed, and the others cannot go on without it: the same command goes on from checkpoint-"


def killed(command: list[str], run_dir, log, victim: int) -> tuple[int, str]:
    """The exit code of a run whose rank gets SIGKILL after a checkpoint, and what was said."""
    process = start(command, log)
    until(lambda: steps_done(run_dir, 3), process, log)
    rank(process, victim).kill()
    code = process.wait(60)
    said = log.read_text()
    assert said.count("error:") == 1
    (line,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: rank {victim} (process ")
    assert LINE in line
    last = line.partition(LINE)[2].split()[0]
    assert load_file(run_dir / f"checkpoint-{last}/adapter_model.safetensors")
    until_none(run_dir)
    return code, said


def until_none(run_dir) -> None:
    deadline = time.monotonic() + 60
    while alive(str(run_dir)):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.05)


@pytest.mark.full
@pytest.mark.parametrize(("config", "victim"), [("multi_gpu", 0), ("zero2", 1)])
def test_the_others_end_with_a_line_and_the_run_goes_on_from_its_checkpoint(config, victim, tiny, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-m", "grpo_math.cli", "train", "--accelerate_config", config]
    if config == "zero2":
        pytest.importorskip("deepspeed")
        command = two(tmp_path, "grpo_math.train.ranks", config)
    command = [*command, *settings(tiny, run_dir, "--save_strategy=steps", "--save_steps=2", "--ddp_backend=gloo")]
    code, said = killed(command, run_dir, log, victim)
    assert code == 128 + signal.SIGKILL
    assert "Traceback" not in said
    assert "ChildFailedError" not in said
    process = start([*command, "--resume_from_checkpoint=true"], log)
    assert process.wait(300) == 0, log.read_text()[-4000:]
    assert [line["step"] for line in history(run_dir)] == list(range(1, STEPS + 1))


@pytest.mark.full
def test_under_plain_accelerate_the_line_stands_before_torchs_page(tiny, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    more = ("--save_strategy=steps", "--save_steps=2")
    command = [*two(tmp_path, "accelerate.commands.launch"), *settings(tiny, run_dir, *more)]
    code, said = killed(command, run_dir, log, 1)
    assert code == 1
    assert said.count("Traceback") == 1, "the agent's own"
    assert said.index("error:") < said.index("ChildFailedError")
    assert "exitcode  : -9" in said.partition("Root Cause")[2], "the others ended after the agent had seen it"


@pytest.mark.slow
def test_a_rank_that_is_killed_before_it_has_begun_is_said_by_what_started_it(tiny, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    process = start([*two(tmp_path, "grpo_math.train.ranks"), *settings(tiny, run_dir)], log)
    until(lambda: rank(process, 1), process, log)
    rank(process, 1).kill()
    assert process.wait(60) == 128 + signal.SIGKILL
    assert log.read_text().endswith("error: training was ended by SIGKILL: the same command starts it again\n")
    until_none(run_dir)


# Ranks that do not train, so that each can be at a point of the test's choosing.
RANKS = """
import os, sys, time, ctypes
from accelerate import PartialState
from grpo_math.run.peers import Peers
from grpo_math.run.signals import Stop
peers, rank, how = Peers(), int(os.environ["RANK"]), sys.argv[1]
with Stop(too_late=peers.broken):
    PartialState(cpu=True)
    peers.watch(lambda: "ADVICE")
    if rank == 1:
        time.sleep(1)
        if how == "killed":
            os.kill(os.getpid(), 9)
        peers.leave(0 if how == "done" else 3)
        os._exit(0 if how == "done" else 3)
    if how == "done":
        time.sleep(6)
        print("the rest is done")
        peers.leave(0)
    else:
        ctypes.CDLL(None).sleep(600)
"""


@pytest.fixture
def ranks():
    """A function that starts two ranks without an agent over them, as mpirun or srun may."""
    started: list[subprocess.Popen] = []

    def starts(how: str) -> list[subprocess.Popen]:
        alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        for i in "01":
            environment = variables(**alone, LOCAL_WORLD_SIZE="2", RANK=i, LOCAL_RANK=i)
            said = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen([sys.executable, "-c", RANKS, how], env=environment, cwd=ROOT, **said))
        return started

    yield starts
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.full
def test_a_rank_that_waits_outside_of_python_ends_too(ranks):
    """As one does in a collective over NCCL: no signal handler runs, and no agent is there."""
    one, other = ranks("killed")
    _, err = one.communicate(timeout=120)
    assert one.returncode == GONE
    assert f"error: rank 1 (process {other.pid}) was killed or has crashed" in err
    assert "ADVICE" in err


@pytest.mark.full
def test_a_rank_that_ended_by_itself_is_followed_without_a_word(ranks):
    one, _ = ranks("failed")
    _, err = one.communicate(timeout=120)
    assert one.returncode == 3
    assert "error:" not in err


@pytest.mark.full
def test_a_rank_that_is_done_leaves_the_others_to_their_work(ranks):
    one, _ = ranks("done")
    out, _ = one.communicate(timeout=120)
    assert (one.returncode, out) == (0, "the rest is done\n")
