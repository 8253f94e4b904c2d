"""Processes that are started by a thread which lives as long as this process.

A worker asks the kernel to kill it with its parent, and the kernel means the thread that started it: one that grades a
batch may end long before the workers that it was the first to need.

Does not wait for a process, and does not end one.
"""

import os
import queue
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Process = subprocess.Popen[bytes]


def started(command: list[str], **options: Any) -> Process:
    """The process of a command, with pipes for its input and output.

    >>> started(["echo", "hello"]).communicate()[0]
    b'hello\\n'
    """
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process: Future[Process] = Future()
    _asked().put((process, lambda: subprocess.Popen(command, bufsize=0, **pipes, **options)))
    try:
        return process.result()
    except KeyboardInterrupt:
        process.add_done_callback(_unwanted)
        raise


def _unwanted(process: Future[Process]) -> None:
    if process.exception() is None:
        process.result().kill()


Asked = queue.SimpleQueue[tuple[Future[Process], Callable[[], Process]]]

_queue: Asked | None = None
_lock = threading.Lock()


def _asked() -> Asked:
    """What the thread of this process is asked for; it begins with the first."""
    global _queue
    with _lock:
        if _queue is None:
            asked: Asked = queue.SimpleQueue()
            threading.Thread(target=_start, args=(asked,), name="grading workers", daemon=True).start()
            _queue = asked  # not before: the system may refuse the thread
        return _queue


def _start(asked: Asked) -> None:
    while True:
        process, start = asked.get()
        try:
            process.set_result(start())
        except BaseException as error:
            process.set_exception(error)


def _after_fork() -> None:
    global _queue, _lock
    _queue, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
