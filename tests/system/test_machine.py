"""The machine of a run, its lock on a folder, a user's functions, and calls that the main process makes for all."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest.mock import Mock, patch

import accelerate
import pytest
import torch
from launching import variables
from torch.distributed import HashStore, distributed_c10d

from grpo_math.cli import main
from grpo_math.errors import ConfigError, UserError
from grpo_math.run import lock
from grpo_math.system import collectives, machine
from grpo_math.system.user_functions import call_on_example

MINE = """
import sys
halve = lambda values, more: values / 2
number = lambda values, more: 1.0
flat = lambda values, more: values[0]
fails = lambda values, more: {}["x"]
leaves = lambda values, more: sys.exit(3)
def function(): ...
def _hidden(): ...
"""


@pytest.mark.parametrize(
    ("file", "limit", "gb"),
    [
        ("memory.max", "max\n", None),
        ("memory.max", "536870912\n", 0.5),
        ("memory/memory.limit_in_bytes", "1073741824\n", 1.0),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),
        ("other", "1", None),
    ],
)
def test_main_memory_is_the_machines_within_the_limit_of_a_container(file, limit, gb, tmp_path):
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / machine.GB
    path = tmp_path / "fs/cgroup" / file
    path.parent.mkdir(parents=True)
    path.write_text(limit)
    assert machine.main_memory(tmp_path) == (gb or whole)


@pytest.mark.parametrize(
    ("siblings", "quota", "cores"),
    [
        ("ABCD", None, 4),
        ("AABB", "max 100000", 2),  # two threads on each core
        ("ABCD", "150000 100000", 2),
        ("ABCD", "10000 100000", 1),
        ("", None, 4),  # a machine without the files
    ],
)
def test_the_threads_of_training_are_the_cores_that_this_process_may_use(siblings, quota, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for cpu, name in enumerate(siblings):
        file = tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(name)
    if quota:
        (tmp_path / "fs/cgroup").mkdir(parents=True)
        (tmp_path / "fs/cgroup/cpu.max").write_text(quota)
    assert machine.physical_cores(tmp_path) == cores
    asked = Mock()
    monkeypatch.setattr(torch, "set_num_threads", asked)
    for threads in ("3", None):
        monkeypatch.setenv("OMP_NUM_THREADS", threads) if threads else monkeypatch.delenv("OMP_NUM_THREADS", False)
        machine.use_physical_cores()
    asked.assert_called_once_with(machine.physical_cores())


def test_the_gpus_of_a_machine_are_written_down():
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpu = {"cpus": os.cpu_count(), "memory_gb": round(memory, 1)}
    assert machine.hardware() == {**cpu, "threads": torch.get_num_threads()}
    card = SimpleNamespace(name="A100", total_memory=39.56 * 2**30)
    cuda = {"is_available": lambda: True, "device_count": lambda: 2, "get_device_properties": [card].__getitem__}
    with patch.multiple(torch.cuda, **cuda):
        assert machine.hardware() == {**cpu, "gpu": "A100", "gpus": 2, "gpu_memory_gb": 39.6}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine:number", "returned a float: return a tensor of shape (2, 3), as it was given"),
        ("mine:flat", "returned a tensor of shape (3,): return a tensor of shape (2, 3), as it was given"),
        ("mine:fails", "raised KeyError: 'x' on a small example: it is called with 2 tensors of shape (2, 3)"),
        ("mine:leaves", "raised SystemExit: 3 on a small example: it is called with 2 tensors of shape (2, 3)"),
        (
            "mine:sys",
            "names no function of mine: use one of its functions: halve, number, flat, fails, leaves, function",
        ),
        (
            "exits:f",
            "names a module that cannot be imported (SystemExit: 0): write module:function, module as in an import",
        ),
        (
            "mime:halve",
            "names a module that cannot be imported (ModuleNotFoundError: No module named 'mime'): did you mean "
            "mine:halve?",
        ),
    ],
)
def test_a_function_of_the_user_is_tried_and_what_is_wrong_is_one_line(name, message, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    sample = torch.ones(2, 3)
    assert torch.equal(call_on_example("surrogate", "mine:halve", sample, sample, sample), sample / 2)
    with pytest.raises(ConfigError) as error:
        call_on_example("surrogate", name, sample, sample, sample)
    assert str(error.value) == f"surrogate={name!r} {message}"
    assert sys.path[-1] == str(tmp_path), "last, so that it hides no package"


@pytest.mark.parametrize("error", [UserError("this cannot be"), KeyError("x")])
def test_one_process_gets_its_own_error(error):
    with pytest.raises(type(error)) as raised:
        collectives.broadcast_from_main(Mock(side_effect=error))
    assert raised.value is error


@pytest.mark.parametrize(("is_done", "expected", "waits"), [(True, 1, 0), (False, 1, 1), (True, 3, 2)])
def test_a_process_waits_until_the_expected_number_is_done(is_done, expected, waits, monkeypatch):
    store, number = HashStore(), next(collectives._waits)
    key, slept = f"grpo_math/done/{number + 1}", []
    monkeypatch.setattr(accelerate, "PartialState", lambda: SimpleNamespace(num_processes=3))
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr("time.sleep", lambda seconds: slept.append(store.add(key, 1)))
    collectives._wait_until_done(is_done, expected)
    assert (len(slept), store.add(key, 0)) == (waits, expected)


# Two runs in one folder

# Holds the lock, and has forked a helper, which outlives it.
HOLDS = """
import os, sys, time
from pathlib import Path
from grpo_math.run import lock
lock.acquire(Path(sys.argv[1]))
if not os.fork():
    print(os.getpid())  # it has let the lock go by now
    time.sleep(600)
input()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that trains in ``tmp_path / "run"``, and the helper that it has forked."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", HOLDS, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=variables(),
    )
    child = int(process.stdout.readline())
    yield process
    process.kill()
    process.wait()
    os.kill(child, signal.SIGKILL)


def test_another_process_is_refused_until_the_first_is_killed(other, tmp_path, capsys):
    run_dir, owner = tmp_path / "run", f"process {other.pid} on {socket.gethostname()}"
    assert lock.owner(run_dir) == owner
    with pytest.raises(ConfigError, match=f"output_dir='.*' is in use: {owner} trains there: wait until"):
        lock.acquire(run_dir)
    # The run has ended, and its report is still written.
    (run_dir / "finished.json").write_text("{}")
    assert main(["demo", "--output_dir", str(run_dir)]) == 2
    assert f"is in use: {owner} trains there" in capsys.readouterr().err
    other.kill()
    other.wait()
    lock.acquire(run_dir)
    assert lock.owner(run_dir) is None, "it is our own"
    assert (run_dir / lock.NAME).read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    lock.acquire(tmp_path)
    assert "cannot be locked (No locks available): check that no other run writes to it" in capsys.readouterr().err


def test_a_reader_that_asks_for_the_owner_delays_a_run_for_an_instant_and_does_not_refuse_it(tmp_path):
    with open(tmp_path / lock.NAME, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert lock.owner(tmp_path) == "another process"
        fcntl.flock(file, fcntl.LOCK_SH)
        assert lock.owner(tmp_path) is None
        threading.Timer(0.1, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        lock.acquire(tmp_path)
