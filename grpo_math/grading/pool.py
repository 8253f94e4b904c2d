"""Killable worker processes: jobs in, one outcome each, within the time limit.

A worker past its limit is killed and replaced; one that dies takes its own answer with it and no other. The loop runs
in the calling thread, so any thread will do, and several may call at once: they share the workers. Workers start on
first need, end when the parent does (their stdin closes), and a forked child starts its own.

Does not look into an answer: what the frames hold is the worker's business.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.errors import UserError
from grpo_math.grading.frames import decode, encode
from grpo_math.grading.verdict import Verdict

MEMORY_BYTES = 1_000_000_000  # address space of one worker, unless GRPO_MATH_GRADE_MEMORY names another
START_SECONDS = 120.0  # a worker that has not said "ready" by then cannot start
START_ALLOWANCE = 0.8  # seconds of a worker's start that do not count against its first job


class Outcome(NamedTuple):
    verdict: Verdict
    reason: str
    seconds: float


class WorkerError(UserError, RuntimeError):
    """The grading worker cannot start."""


class _Worker:
    def __init__(self, memory: int) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = [root, *(entry for entry in sys.path if entry and entry != root)]
        env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        env.update(PYTHONPATH=os.pathsep.join(path), OMP_NUM_THREADS="1", PYTHONHASHSEED="0")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grpo_math.grading.worker", str(os.getpid()), str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            cwd=root,
            bufsize=0,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.buffer = bytearray()
        self.ready = False
        self.deadline = time.monotonic() + START_SECONDS
        self.job = -1
        self.started = 0.0

    def send(self, message: dict[str, Any]) -> bool:
        try:
            self.stdin.write(encode(message))
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """One frame, None while it is incomplete; EOFError where the worker is gone."""
        chunk = os.read(self.stdout.fileno(), 65536)
        if not chunk:
            raise EOFError
        self.buffer += chunk
        return decode(self.buffer)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.close()

    def close(self) -> None:
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


class Pool:
    """At most ``size`` workers, shared by the threads of this process."""

    def __init__(self, size: int, memory: int = MEMORY_BYTES) -> None:
        self.size, self.memory = size, memory
        self._workers: set[_Worker] = set()
        self._idle: deque[_Worker] = deque()
        self._free = threading.Condition()
        self._failed_starts = 0
        self._killed_since: float | None = None  # when the first of the starts was killed that none has outlived
        self._waiting_threads = 0

    def run(
        self,
        jobs: Sequence[tuple[str, str]],
        timeout: float,
        workers: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Outcome]:
        """The outcome of each (gold, answer), in order. ``progress`` gets the index of each job as it ends."""
        outcomes: list[Outcome | None] = [None] * len(jobs)
        waiting = deque(range(len(jobs)))
        busy: set[_Worker] = set()
        most = min(len(jobs), workers or self.size)
        asked = time.monotonic()
        selector = selectors.DefaultSelector()

        def finish(worker: _Worker, verdict: Verdict, reason: str) -> None:
            outcomes[worker.job] = Outcome(verdict, reason, time.monotonic() - worker.started)
            job, worker.job = worker.job, -1
            if progress is not None:
                progress(job)

        def release(worker: _Worker, alive: bool) -> None:
            selector.unregister(worker.stdout)
            busy.discard(worker)
            self._give_back(worker, alive)

        try:
            while waiting or any(worker.job >= 0 for worker in busy):
                while len(busy) < most and len([w for w in busy if w.job < 0]) < len(waiting):
                    taken = self._take(block=not busy)
                    if taken is None:
                        break
                    busy.add(taken)
                    selector.register(taken.stdout, selectors.EVENT_READ, taken)
                    if taken.ready:
                        self._assign(taken, waiting.popleft(), jobs, timeout, asked)
                now = time.monotonic()
                wait = max(0.0, min(worker.deadline for worker in busy) - now)
                for key, _ in selector.select(min(wait, 1.0)):
                    worker = key.data
                    try:
                        reply = worker.receive()
                    except (EOFError, OSError):
                        if worker.job >= 0:
                            finish(worker, Verdict.CRASH, "the worker died")
                        else:
                            self._note_ended_start(worker)
                        release(worker, alive=False)
                        continue
                    if reply is None:
                        continue
                    if "error" in reply:
                        raise WorkerError(f"the grading worker cannot start: {reply['error']}")
                    if "ready" in reply:
                        worker.ready = True
                        self._failed_starts, self._killed_since = 0, None
                    else:
                        finish(worker, Verdict(reply["verdict"]), reply["reason"])
                        if reply["retire"]:
                            release(worker, alive=False)
                            continue
                    if waiting and not self._others_wait():
                        self._assign(worker, waiting.popleft(), jobs, timeout, asked)
                    else:
                        release(worker, alive=True)
                now = time.monotonic()
                for worker in [w for w in busy if w.deadline <= now]:
                    if worker.job >= 0:
                        finish(worker, Verdict.TIMEOUT, f"stopped after {time.monotonic() - worker.started:.1f} s")
                    else:
                        self._note_failed_start(f"not ready after {START_SECONDS:g} s")
                    release(worker, alive=False)
        finally:
            for worker in list(busy):  # starting still, or an exception such as Ctrl-C is on its way
                release(worker, alive=worker.job < 0)
            selector.close()
        return [outcome for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        """Kill every worker. The pool can be used again."""
        with self._free:
            workers, self._workers = self._workers, set()
            self._idle.clear()
            self._free.notify_all()
        for worker in workers:
            worker.kill()

    def forget(self) -> None:
        """In a forked child: the workers are the parent's. Close our copies of their pipes, and nothing more."""
        for worker in self._workers:
            worker.close()
        self._workers, self._idle = set(), deque()

    def pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return [worker.process.pid for worker in self._workers]

    def _assign(self, worker: _Worker, job: int, jobs: Sequence[tuple[str, str]], timeout: float, asked: float) -> None:
        now = time.monotonic()
        limit = timeout
        if job < self.size:  # the first jobs waited for the start: keep their whole wait near the limit
            limit -= min(timeout / 2, max(0.0, now - asked - START_ALLOWANCE))
        worker.job, worker.started, worker.deadline = job, now, now + limit
        gold, answer = jobs[job]
        worker.send({"gold": gold, "answer": answer, "limit": limit})  # a dead worker shows as EOF in the loop

    def _take(self, block: bool) -> _Worker | None:
        with self._free:
            self._waiting_threads += 1
            try:
                while True:
                    while self._idle:
                        worker = self._idle.popleft()
                        if worker.process.poll() is None:
                            worker.deadline = time.monotonic() + START_SECONDS
                            return worker
                        self._workers.discard(worker)  # it died while idle
                        worker.close()
                    if len(self._workers) < self.size:
                        return self._start()
                    if not block:
                        return None
                    self._free.wait(1.0)
            finally:
                self._waiting_threads -= 1

    def _others_wait(self) -> bool:
        return self._waiting_threads > 0

    def _start(self) -> _Worker:
        worker = _Worker(self.memory)
        self._workers.add(worker)
        return worker

    def _give_back(self, worker: _Worker, alive: bool) -> None:
        if not alive:
            worker.kill()
        with self._free:
            if worker in self._workers:
                if alive:
                    self._idle.append(worker)
                else:  # its successor starts now, so that the next answer need not wait for it
                    self._workers.discard(worker)
                    self._idle.append(self._start())
            self._free.notify()

    def _note_ended_start(self, worker: _Worker) -> None:
        """A start that something kills from outside is made again for a while; one that fails by itself fails again."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(1.0)
        if worker.process.returncode != -signal.SIGKILL:
            self._note_failed_start("it ended while starting")
            return
        now = time.monotonic()
        self._killed_since = self._killed_since or now
        if now - self._killed_since > START_SECONDS:
            raise WorkerError("the grading worker cannot start: it is killed each time (see the kernel's log, dmesg)")

    def _note_failed_start(self, why: str) -> None:
        self._failed_starts += 1
        if self._failed_starts > 3:
            raise WorkerError(f"the grading worker cannot start: {why}")


_pool: Pool | None = None
_lock = threading.Lock()


def shared_pool() -> Pool:
    """The pool of this process, made on first use."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = Pool(default_size(), int(os.environ.get("GRPO_MATH_GRADE_MEMORY", MEMORY_BYTES)))
            atexit.register(shutdown)
        return _pool


def default_size() -> int:
    """Workers for this process: its share of the cores, at most 8.

    >>> default_size() >= 1
    True
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))))


def shutdown() -> None:
    """End every worker process now. Grading again starts new ones."""
    if _pool is not None:
        _pool.close()


def _after_fork() -> None:
    global _pool, _lock
    _lock = threading.Lock()
    if _pool is not None:
        _pool.forget()
        _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
