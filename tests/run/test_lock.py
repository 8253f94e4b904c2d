"""Two runs in one folder: the second is refused, and a run that was killed leaves no lock behind."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import variables
from small_runs import RUN

from grpo_math.errors import ConfigError
from grpo_math.run import lock
from grpo_math.train.program import main


def elsewhere(folder: Path, then: str = "pass") -> subprocess.Popen[str]:
    """Another process that holds the lock, once it has said so."""
    program = (
        f"from grpo_math.run import lock; from pathlib import Path; lock.hold(Path({str(folder)!r})); print('held')"
    )
    command = [sys.executable, "-u", "-c", f"{program}\n{then}\ninput()"]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables())
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    return other


def test_another_process_is_refused_until_the_first_is_gone_however_it_went(tmp_path):
    other = elsewhere(tmp_path)
    owner = f"process {other.pid} on {socket.gethostname()}"
    try:
        assert lock.owner(tmp_path) == owner
        with pytest.raises(ConfigError, match=f"output_dir='.*' is in use: {owner} trains there: wait until"):
            lock.hold(tmp_path)
    finally:
        other.kill()
        other.wait()
    assert lock.owner(tmp_path) is None
    lock.hold(tmp_path)
    lock.hold(tmp_path)
    assert lock.owner(tmp_path) is None, "it is our own"
    assert (tmp_path / lock.NAME).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_a_forked_child_does_not_keep_the_lock_of_a_run_that_was_killed(tmp_path):
    fork = "import os, time; os.fork() or print(os.getpid()) or time.sleep(600)"
    other = elsewhere(tmp_path, fork)
    child = int(other.stdout.readline())
    other.kill()
    other.wait()
    try:
        lock.hold(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    lock.hold(tmp_path)
    assert "cannot be locked (No locks available): see that no other run writes to it" in capsys.readouterr().err


def test_training_refuses_a_folder_in_which_another_run_trains(tmp_path, capsys):
    other = elsewhere(tmp_path / "run")
    output = f"output_dir='{tmp_path / 'run'}' is in use: process {other.pid} on {socket.gethostname()} trains there"
    arguments = ["--model_name_or_path", "embedded", "--output_dir", str(tmp_path / "run"), *RUN]
    try:
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {output}: wait until")
    finally:
        other.kill()
        other.wait()
