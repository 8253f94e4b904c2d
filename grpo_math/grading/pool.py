"""Killable worker processes: jobs in, one outcome each, within the time limit.

A worker past its limit is killed and replaced; one that dies takes its own answer with it and no other. The loop runs
in the calling thread, so any thread will do, and several may call at once: they share the workers. Workers start on
first need and end when the parent does, at once where the kernel sees to that (starter.py), else when their stdin
closes; a forked child starts its own. An answer goes to a worker that is warm and idle: its clock starts with its work.

Does not look into an answer: what the frames hold is the worker's business.
"""

import atexit
import contextlib
import os
import select
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
from grpo_math.grading.starter import started
from grpo_math.grading.verdict import Verdict

MEMORY_BYTES = 1_000_000_000  # address space of one worker, unless GRPO_MATH_GRADE_MEMORY names another
PAUSES = (0.5, 2.0, 8.0)  # seconds, after each of which a process that the system refused is asked for again
START_SECONDS = 120.0  # a worker that has not said "ready" by then cannot start

Job = tuple[Any, ...]  # gold, answer, and the rules of the house where they are not the usual ones
Progress = Callable[[int], None]


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
        command = [sys.executable, "-m", "grpo_math.grading.worker", str(os.getpid()), str(memory)]
        for pause in (*PAUSES, None):
            try:
                self.process = started(command, env=env, cwd=root)
                break
            except (OSError, RuntimeError) as error:  # the system gives no process, no thread, or no open file
                if pause is None:
                    why = getattr(error, "strerror", None) or error
                    remedy = "raise the limit that it names (ulimit -a), or end other programs"
                    raise WorkerError(f"the grading worker cannot start: {why}: {remedy}") from None
                time.sleep(pause)
        assert self.process.stdin is not None and self.process.stdout is not None  # noqa: PT018
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.buffer = bytearray()
        self.ready = False
        self.deadline = time.monotonic() + START_SECONDS
        self.job = -1
        self.started = 0.0

    def is_up(self) -> bool:
        """Is it ready, or has at least something to say?"""
        return self.ready or bool(select.select([self.stdout], [], [], 0)[0])

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a dead worker shows as EOF where its answer is read
            self.stdin.write(encode(message))

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
        self, jobs: Sequence[Job], timeout: float, workers: int | None = None, progress: Progress | None = None
    ) -> list[Outcome]:
        """The outcome of each (gold, answer), in order. ``progress`` gets the index of each job as it ends."""
        most = min(len(jobs), workers or self.size)
        return _Call(self, jobs, timeout, most, progress or (lambda job: None)).outcomes()

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

    def _take(self, block: bool) -> _Worker | None:
        with self._free:
            self._waiting_threads += 1
            try:
                while True:
                    while self._idle:
                        worker = next((w for w in self._idle if w.is_up()), self._idle[0])
                        self._idle.remove(worker)
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

    def _start(self) -> _Worker:
        worker = _Worker(self.memory)
        self._workers.add(worker)
        return worker

    def _warm(self) -> None:
        """Have one more worker than are busy, as far as ``size`` allows."""
        with self._free:
            if not self._idle and len(self._workers) < self.size:
                self._idle.append(self._start())

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


class _Call:
    """One call of `Pool.run`: its jobs, and the workers that it holds meanwhile, ``most`` of them at once."""

    def __init__(self, pool: Pool, jobs: Sequence[Job], timeout: float, most: int, progress: Progress) -> None:
        self.pool, self.jobs, self.timeout, self.most, self.progress = pool, jobs, timeout, most, progress
        self.done: dict[int, Outcome] = {}
        self.waiting = deque(range(len(jobs)))
        self.busy: set[_Worker] = set()
        self.selector = selectors.DefaultSelector()

    def outcomes(self) -> list[Outcome]:
        try:
            while self.waiting or any(worker.job >= 0 for worker in self.busy):
                self._take()
                wait = min(worker.deadline for worker in self.busy) - time.monotonic()
                for key, _ in self.selector.select(min(max(0.0, wait), self.timeout / 4, 1.0)):
                    self._collect(key.data)
                self._overrun()
        finally:
            for worker in list(self.busy):  # starting still, or an exception such as Ctrl-C is on its way
                self._release(worker, alive=worker.job < 0)
            self.selector.close()
        return [self.done[job] for job in range(len(self.jobs))]

    def _take(self) -> None:
        """As many workers as there are jobs for; it waits for one only where it has none."""
        while len(self.busy) < self.most and len([w for w in self.busy if w.job < 0]) < len(self.waiting):
            taken = self.pool._take(block=not self.busy)
            if taken is None:
                return
            self.busy.add(taken)
            self.selector.register(taken.stdout, selectors.EVENT_READ, taken)
            if taken.ready:
                self._assign(taken)

    def _assign(self, worker: _Worker) -> None:
        job, now = self.waiting.popleft(), time.monotonic()
        worker.job, worker.started, worker.deadline = job, now, now + self.timeout
        gold, answer, *house = self.jobs[job]
        worker.send({"gold": gold, "answer": answer, "house": house, "limit": self.timeout})

    def _collect(self, worker: _Worker) -> None:
        """What a worker has sent, or that it died; a worker that is ready then gets the next job."""
        try:
            reply = worker.receive()
        except (EOFError, OSError):
            if worker.job >= 0:
                self._finish(worker, Verdict.CRASH, "the worker died")
            else:
                self.pool._note_ended_start(worker)
            return self._release(worker, alive=False)
        if reply is None:
            return None
        if "error" in reply:
            raise WorkerError(f"the grading worker cannot start: {reply['error']}")
        if "ready" in reply:
            worker.ready = True
            self.pool._failed_starts, self.pool._killed_since = 0, None
        else:
            self._finish(worker, Verdict(reply["verdict"]), reply["reason"])
            if reply["retire"]:
                return self._release(worker, alive=False)
        if self.waiting and not self.pool._waiting_threads:
            return self._assign(worker)
        return self._release(worker, alive=True)

    def _overrun(self) -> None:
        """Kill the workers whose time is over. Where a quarter of it is, another one warms up meanwhile."""
        now = time.monotonic()
        if any(worker.job >= 0 and now - worker.started > self.timeout / 4 for worker in self.busy):
            self.pool._warm()
        for worker in [w for w in self.busy if w.deadline <= now]:
            if worker.job >= 0:
                self._finish(worker, Verdict.TIMEOUT, f"stopped after {time.monotonic() - worker.started:.1f} s")
            else:
                self.pool._note_failed_start(f"not ready after {START_SECONDS:g} s")
            self._release(worker, alive=False)

    def _finish(self, worker: _Worker, verdict: Verdict, reason: str) -> None:
        job, worker.job = worker.job, -1
        self.done[job] = Outcome(verdict, reason, time.monotonic() - worker.started)
        self.progress(job)

    def _release(self, worker: _Worker, alive: bool) -> None:
        self.selector.unregister(worker.stdout)
        self.busy.discard(worker)
        self.pool._give_back(worker, alive)


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
