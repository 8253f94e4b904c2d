"""Two runs in one folder: the second is refused, and a run that was killed leaves no lock behind."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from launching import variables
from small_runs import RUN

from grpo_math.errors import ConfigError
from grpo_math.run import lock
from grpo_math.train.program import main

# Holds the lock, and has forked a helper, which outlives it.
HOLDS = """
import os, sys, time
from pathlib import Path
from grpo_math.run import lock
lock.hold(Path(sys.argv[1]))
print(os.fork() or time.sleep(600))
input()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that trains in ``tmp_path / "run"``, and the helper that it has forked."""
    command = [sys.executable, "-u", "-c", HOLDS, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables())
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process
    process.kill()
    process.wait()
    os.kill(child, signal.SIGKILL)


def test_another_process_is_refused_until_the_first_is_killed(other, tmp_path, capsys):
    run_dir, owner = tmp_path / "run", f"process {other.pid} on {socket.gethostname()}"
    assert lock.owner(run_dir) == owner
    with pytest.raises(ConfigError, match=f"output_dir='.*' is in use: {owner} trains there: wait until"):
        lock.hold(run_dir)
    other.kill()
    other.wait()
    assert lock.owner(run_dir) is None
    lock.hold(run_dir)
    assert lock.owner(run_dir) is None, "it is our own"
    assert (run_dir / lock.NAME).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    lock.hold(tmp_path)
    assert "cannot be locked (No locks available): see that no other run writes to it" in capsys.readouterr().err


def test_a_reader_that_asks_for_the_owner_delays_a_run_for_an_instant_and_does_not_refuse_it(tmp_path):
    with open(tmp_path / lock.NAME, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert lock.owner(tmp_path) == "another process"
        fcntl.flock(file, fcntl.LOCK_SH)
        assert lock.owner(tmp_path) is None
        threading.Timer(0.1, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        lock.hold(tmp_path)


def test_training_refuses_a_folder_in_which_another_run_trains(other, letters_model, tmp_path, capsys):
    command = ["--model_name_or_path", letters_model, "--output_dir", str(tmp_path / "run"), *RUN]
    assert main(command) == 2
    line = (
        f"error: output_dir='{tmp_path / 'run'}' is in use: process {other.pid} on {socket.gethostname()} trains there"
    )
    assert capsys.readouterr().err.startswith(line)
