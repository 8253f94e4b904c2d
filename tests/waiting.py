"""Waiting for what another process does, and finding the processes that a test started."""

import contextlib
import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator

import psutil

PR_SET_CHILD_SUBREAPER = 36


def descendants(pid: int) -> list[psutil.Process]:
    """Return the processes below a process, each after its parent.

    A test signals these and no others: the machine may run other tests, and trainings.
    """
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@contextlib.contextmanager
def adopting(mark: str) -> Iterator[None]:
    """Keep every process below this one there: one that loses its parent becomes a child of this process.

    Kill those that are `alive` with ``mark`` at the end.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        left = alive(mark)
        for process in descendants(os.getpid()):
            if process.pid in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def alive(mark: str) -> list[int]:
    """Return the processes that have ``mark`` among the words of their command, or as a value of their environment.

    Only to see what is left, because a process that lost its parent is below nobody. No other program may have the
    mark: use a path in `tmp_path`. A supervisor has the mark of its command too.
    """
    processes = (process.info for process in psutil.process_iter(["pid", "cmdline", "environ"]))
    return [p["pid"] for p in processes if mark in [*(p["cmdline"] or ()), *(p["environ"] or {}).values()]]


def until(true, seconds: float = 120.0, message: str = "it never came", pause: float = 0.02) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, message
        time.sleep(pause)


def in_a_fork(code: Callable[[], object]) -> int | None:
    """Run the code in a forked process, and return its exit code."""
    child = multiprocessing.get_context("fork").Process(target=code)
    child.start()
    child.join()
    return child.exitcode
