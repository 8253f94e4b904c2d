"""Two runs in one folder: the second is refused, and a run that was killed leaves no lock behind."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT, accelerate, variables
from small_runs import PATH, RUN, launch

from grpo_math.errors import ConfigError
from grpo_math.report import report
from grpo_math.run import lock
from grpo_math.train import program, resuming
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


def test_a_folder_that_is_not_there_is_made_when_it_is_asked_for(tmp_path):
    lock.hold(tmp_path / "a/b", make=False)
    assert not (tmp_path / "a").exists()
    assert lock.owner(tmp_path / "a/b") is None
    lock.hold(tmp_path / "a/b")
    assert (tmp_path / "a/b" / lock.NAME).exists()


@pytest.mark.slow
def test_what_a_run_goes_on_from_is_decided_once_the_folder_is_its_own(tiny, tmp_path, monkeypatch):
    """Another run may have made the folder since: nothing of it may be touched."""
    held = []
    hold, decide = lock.hold, resuming.go_on
    monkeypatch.setattr(lock, "hold", lambda folder, make=True: held.append(make) or hold(folder, make))

    def decides(*arguments):
        assert held == [False, True]
        assert lock.owner(tmp_path / "run") is None
        held.append(None)
        return decide(*arguments)

    monkeypatch.setattr(program, "go_on", decides)

    class Decided(BaseException):
        pass

    def decided(*arguments):
        raise Decided

    monkeypatch.setattr(program, "trainer_of", decided)
    arguments = ["--model_name_or_path", tiny(), "--output_dir", str(tmp_path / "run"), *RUN]
    with pytest.raises(Decided):
        main(arguments)
    assert held == [False, True, None]


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    lock.hold(tmp_path)
    assert "cannot be locked (No locks available): see that no other run writes to it" in capsys.readouterr().err


@pytest.mark.full
def test_a_second_run_is_refused_while_the_first_trains_and_its_report_can_be_read(tiny, tmp_path, capsys):
    folder, go = tmp_path / "run", tmp_path / "go"
    command = launch(tiny(), folder, "hangs_on_one_rank")
    environment = variables(PYTHONPATH=PATH, GO=str(go), HANGS="0")
    first = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        while not (folder / "history.jsonl").exists():
            assert first.poll() is None
            time.sleep(0.05)
        said = (
            f"output_dir='{folder}' is in use: process {first.pid} on {socket.gethostname()} trains there: wait until"
        )
        arguments = ["--model_name_or_path", "no/such/model", "--output_dir", str(folder), *RUN]
        capsys.readouterr()
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {said}")
        both = [*accelerate("multi_gpu", tmp_path, "--num_processes", "2"), "-m", "grpo_math.train", *arguments]
        done = subprocess.run(both, env=variables(), cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.stderr.count(f"error: {said}") == 1
        (tmp_path / "recipe.yaml").write_text("seed: 1\n")
        doctor = [
            sys.executable,
            "-m",
            "grpo_math.cli",
            "doctor",
            "--config",
            str(tmp_path / "recipe.yaml"),
            *arguments,
        ]
        done = subprocess.run(doctor, env=variables(), cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 1
        assert f"error: {said.partition(': wait')[0]}. Remedy: wait until" in done.stdout
        assert report(folder).html.exists()
        go.write_text("")
        _, err = first.communicate(timeout=300)
        assert first.returncode == 0, err
    finally:
        first.kill()
