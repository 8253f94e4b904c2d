"""Worker processes that compare two answers: one line of JSON to a worker for each job, one line back.

A worker (judge.py) limits its own CPU time and memory. A thread waits for each busy worker. A try without a reply is
repeated on a new worker. Two tries with the same end decide, or one that exceeded its CPU time:

    the worker exceeded its CPU time or its memory    uncheckable: the answer is at fault
    the worker was killed, or did not reply at all    crash: the machine is at fault

Workers start when the first answer needs one, at most `default_size` per process. A worker exits when its input is
closed, and so when this process exits. Any thread may call. A forked child starts new workers.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_math.errors import UserError
from grpo_math.grading.verdict import Grade, Verdict

MEMORY_BYTES = 1_000_000_000  # address space of one worker; the variable GRPO_MATH_GRADE_MEMORY overrides it
WALL = 10  # seconds of real time for each second of a worker's CPU limit; each retry gets four times as many
START_SECONDS = 120.0  # for a worker to import Math-Verify
PAUSES = (0.5, 2.0, 8.0)  # seconds between attempts to start a worker
REMEDY = "raise the limit that it names (ulimit -a), or end other programs"

Job = tuple[Any, ...]  # gold answer, answer, and the fields of `GradingPolicy` unless they are the defaults
Progress = Callable[[int], None]


class WorkerError(UserError, RuntimeError):
    """The grading worker cannot start."""


class _Worker:
    """A process of judge.py. One thread at a time may use it."""

    def __init__(self, memory: int) -> None:
        # Workers import from the same folders in the same order as this process. Hashes are the same in all workers.
        path = [*filter(None, sys.path), str(Path(__file__).resolve().parents[2])]
        env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        env |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-P", "-m", "grpo_math.grading.judge", str(memory)]
        self.socket, theirs = socket.socketpair()
        with theirs:
            pipes: dict[str, Any] = {"stdin": theirs.fileno(), "stdout": theirs.fileno(), "stderr": subprocess.DEVNULL}
            self.process = subprocess.Popen(command, env=env, **pipes)
        self.socket.settimeout(START_SECONDS)
        try:
            while self._line() != b'"ready"\n':  # a library may print while it is imported
                pass
        except OSError:
            if self.end() > 0:
                raise WorkerError(f"the grading worker cannot start: {' '.join(command)} says why") from None
            raise

    def _line(self) -> bytes:
        """Return the next line. Raises `OSError` if the process has ended or its time is over."""
        line = b""
        while not line.endswith(b"\n"):
            chunk = self.socket.recv(65536)
            if not chunk:
                raise OSError("it is killed each time (see the kernel's log, dmesg)")
            line += chunk
        return line

    def ask(self, message: Any, seconds: float) -> Any:
        """Return the reply to a message, or None if the worker did not reply. Discard the worker in that case."""
        self.socket.settimeout(seconds)
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
            return json.loads(self._line())
        except TimeoutError:
            self.process.kill()
        except OSError:
            pass
        return None

    def end(self) -> int:
        """Wait for the process to exit, or kill it. Return its exit code: -n if signal n ended the process."""
        self.socket.close()
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(1.0)
        self.process.kill()
        return self.process.wait()


class Pool:
    """At most ``size`` workers, shared by the threads of this process."""

    def __init__(self, size: int, memory: int = MEMORY_BYTES) -> None:
        self.size = size
        self.memory = memory
        self.workers: set[_Worker] = set()
        self._idle: deque[_Worker] = deque()  # deque methods need no lock
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="grading")

    def run(self, jobs: Sequence[Job], limit: float, progress: Progress = lambda number: None) -> list[Grade]:
        """Return the grade of each job, in order. Each job has ``limit`` seconds of CPU time.

        ``progress`` gets the index of each job when it is done.
        """
        stopped = threading.Event()
        futures = {self._threads.submit(self._grade, job, limit, stopped): number for number, job in enumerate(jobs)}
        try:
            for future in as_completed(futures):
                future.result()
                progress(futures[future])
        except BaseException:  # Ctrl-C, or no worker starts
            stopped.set()
            for future in futures:
                future.cancel()
            self.close()  # a thread that waits for a worker would keep the interpreter from exiting
            raise
        return [future.result() for future in futures]

    def _grade(self, job: Job, limit: float, stopped: threading.Event) -> Grade:
        gold, answer, *policy = job
        seconds, wall, ends = 0.0, WALL * limit, Counter[tuple[Verdict, str]]()
        while True:
            worker = self._take(fresh=bool(ends))
            if stopped.is_set():
                self._idle.append(worker)
                raise CancelledError
            started = time.monotonic()
            reply = worker.ask([gold, answer, policy, limit], wall)
            seconds += time.monotonic() - started
            if reply is not None and not reply[2]:
                self._idle.append(worker)
            else:
                end = _meaning(self._discard(worker), limit)
            if reply is not None:
                return Grade(Verdict(reply[0]), answer, seconds=seconds, reason=reply[1])
            ends[end] += 1
            wall *= 4
            # A worker's CPU time does not depend on other programs: another try would take as long.
            if ends[end] == 2 or end == _meaning(-signal.SIGPROF, limit):
                return Grade(end[0], answer, seconds=seconds, reason=end[1])

    def _take(self, fresh: bool) -> _Worker:
        """Return a new worker, or the idle worker that was used last."""
        while self._idle and not fresh:
            with suppress(IndexError):  # another thread was faster
                worker = self._idle.pop()
                if worker.process.poll() is None:
                    return worker
                self._discard(worker)
        for pause in (*PAUSES, None):
            try:
                worker = _Worker(self.memory)
                break
            except OSError as error:  # the system has no process or no open file left, or killed the worker
                if pause is None:
                    why = error.strerror or error
                    raise WorkerError(f"the grading worker cannot start: {why}: {REMEDY}") from None
                time.sleep(pause)
        self.workers.add(worker)
        return worker

    def _discard(self, worker: _Worker) -> int:
        self.workers.discard(worker)
        return worker.end()

    def close(self) -> None:
        """Kill all workers. The pool can be used again."""
        self._idle.clear()
        for worker in list(self.workers):
            worker.process.kill()
            self._discard(worker)


def _meaning(code: int, limit: float) -> tuple[Verdict, str]:
    """Return the verdict on an answer whose worker ended without a reply, and its reason.

    >>> _meaning(-signal.SIGPROF, 5.0)[1], _meaning(-signal.SIGKILL, 5.0)[1]
    ('more than 5 s of CPU time', 'the worker was killed')
    """
    if code == -signal.SIGKILL:
        return Verdict.CRASH, "the worker was killed"
    return Verdict.UNCHECKABLE, f"more than {limit:g} s of CPU time" if code == -signal.SIGPROF else "out of memory"


_pools: dict[int, Pool] = {}  # by process id


def shared_pool() -> Pool:
    """Return the pool of this process."""
    pid, memory = os.getpid(), int(os.environ.get("GRPO_MATH_GRADE_MEMORY", MEMORY_BYTES))
    return _pools.get(pid) or _pools.setdefault(pid, Pool(default_size(), memory))


def default_size() -> int:
    """Return the maximum number of workers of this process: its share of the cores, at most 8.

    >>> 1 <= default_size() <= 8
    True
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))))


def shutdown() -> None:
    """End all workers of this process now. Grading again starts new workers."""
    for pool in list(_pools.values()):
        pool.close()


def _forget() -> None:
    """Close the copies of the parent's sockets in a forked child: they would keep the parent's workers alive."""
    for pool in _pools.values():
        for worker in pool.workers:
            worker.socket.close()
    _pools.clear()


os.register_at_fork(after_in_child=_forget)
