"""The Python tool: a program in, what it prints out, in a process that has nothing of this one's.

A call costs two forks of a server that is warm (server.py). This end holds the wall clock and reads a bounded part of
what is printed; a program that overruns either is killed, and with it whatever it has started. Any thread may call.

Does not put up the walls (confine.py), and does not test them (walls.py).
"""

import atexit
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from grpo_math.errors import UserError
from grpo_math.grading.frames import encode
from grpo_math.grading.pool import default_size
from grpo_math.grading.starter import started
from grpo_math.tools.limits import PythonLimits
from grpo_math.tools.syscalls import machine

START_SECONDS = 60.0  # the server imports numpy and sympy, and a program's process is up
PAUSES = (0.2, 1.0, 5.0)  # seconds, after each of which a program that the system gave no process is tried again
PACKAGES = ("numpy", "sympy", "mpmath")
NOTHING = "(no output)"
GONE = b"Dthe program's process is gone"
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")


class ToolError(UserError, RuntimeError):
    """The Python tool cannot start a program: the machine's fault, never the program's."""


class Answer(str):
    """What a call gives the model; ``status`` is ``done``, ``failed`` (the program raised or died) or ``timeout``."""

    status: str

    def __new__(cls, text: str, status: str) -> "Answer":
        answer = super().__new__(cls, text)
        answer.status = status
        return answer


class _Server:
    """The process that programs are forked from. ``without``: layers that are not to be put up, for tests."""

    def __init__(self, packages: bool = True, without: Sequence[str] = ()) -> None:
        if sys.platform != "linux" or not hasattr(os, "pidfd_open") or machine() is None:
            raise ToolError("the Python tool needs Linux 5.3 or newer on x86-64 or ARM64: leave python out of tools")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        shown = paths()
        root = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-s", "-P", "-B", "-m", "grpo_math.tools.server", str(os.getpid())]
        command += [
            str(theirs.fileno()),
            json.dumps(shown),
            json.dumps(list(without)),
            json.dumps(PACKAGES if packages else ()),
        ]
        env = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        env |= {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join([root, *_packages()])}
        how: dict[str, Any] = {"pass_fds": (theirs.fileno(),), "start_new_session": True, "cwd": "/", "env": env}
        try:
            self.process = started(command, **how)
        except (OSError, RuntimeError) as error:
            raise ToolError(f"the Python tool cannot start: {error}: end other programs") from None
        theirs.close()
        self.requests, self.layers = ours, dict[str, Any]()
        ours.settimeout(START_SECONDS)
        try:
            said = ours.recv(4096)
        except OSError:
            said = b""
        if not said:
            self.close()
            raise ToolError(f"the Python tool cannot start: its process ended or hung: try {sys.executable} -c 1")
        self.layers = json.loads(said)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if folder := self.layers.get("folder"):
            shutil.rmtree(folder, ignore_errors=True)
        self.forget()

    def forget(self) -> None:
        self.requests.close()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def paths() -> list[str]:
    """The folders that a program sees, read-only: the interpreter's libraries and the system's."""
    prefixes = [f"{prefix}/{name}" for prefix in (sys.prefix, sys.base_prefix) for name in ("lib", "lib64")]
    there = [path for path in dict.fromkeys([*SYSTEM, *prefixes, *_packages()]) if os.path.isdir(path)]
    return [one for one in there if not any(one.startswith(f"{other}/") and other != one for other in there)]


def _packages() -> list[str]:
    specs = [importlib.util.find_spec(name) for name in PACKAGES]
    return list(dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin))


_servers: dict[bool, _Server] = {}  # with numpy and sympy imported, and without
_lock = threading.Lock()


def server(packages: bool = False) -> _Server:
    """That of this process, made on first use, and again where it has died."""
    with _lock:
        there = _servers.get(packages)
        if there is not None and there.process.poll() is not None:
            _servers.pop(packages).close()
            there = None
        if there is None:
            atexit.register(shutdown)
            there = _servers[packages] = _Server(packages)
        return there


def server_for(code: str) -> _Server:
    """A fork of a process that has sympy takes five times as long, and importing it a hundred times."""
    return server(packages=any(name in code for name in PACKAGES))


def shutdown() -> None:
    """End the servers and every program. The next call starts a new one."""
    with _lock:
        while _servers:
            _servers.popitem()[1].close()


class Program:
    """A process that runs one program after the other; names stay from one to the next."""

    def __init__(self, limits: PythonLimits, of: Callable[[], _Server] = server) -> None:
        self.limits, self.of = limits, of
        for pause in (*PAUSES, None):
            why = self._start()
            if not why:
                return
            if pause is None:
                raise ToolError(f"a program of the Python tool cannot be started: {why}: end other programs")
            time.sleep(pause)

    def _start(self) -> str:
        """Empty, or why there is no process."""
        asked = json.dumps({name: getattr(self.limits, name) for name in ("cpu_seconds", "memory_mb", "processes")})
        self.control, theirs = socket.socketpair()
        self.out, out = os.pipe()
        self.handle = -1
        try:
            socket.send_fds(self.of().requests, [asked.encode()], [theirs.fileno(), out])
            theirs.close()
            os.close(out)
            self.control.settimeout(START_SECONDS)
            said, handles, _, _ = socket.recv_fds(self.control, 4096, 1)
            self.handle = handles[0] if handles else -1
        except OSError as error:
            said = f"E{error}".encode()
        if said == b"R" and self.handle >= 0:
            return ""
        self.end()
        return said[1:].decode(errors="replace") or "its process ended"

    def run(self, code: str) -> Answer:
        """What the program prints, or the last line of its error; cut, and ended, where it prints or lasts too long."""
        limits, deadline = self.limits, time.monotonic() + self.limits.wall_seconds
        most = 4 * limits.output_chars + 4
        self.control.settimeout(limits.wall_seconds)
        with suppress(OSError):  # a process that has gone shows below
            self.control.sendall(encode({"code": code}))
        waiting = select.poll()  # not select(), which fails where a trainer has a thousand files open
        for file in (self.out, self.control.fileno()):
            waiting.register(file, select.POLLIN)
        printed, said, hung = bytearray(), b"", False
        while not said and len(printed) <= most and not hung:
            ready = dict(waiting.poll(1000 * max(0.0, deadline - time.monotonic())))
            hung = not ready or time.monotonic() > deadline
            if self.out in ready and not self._read(printed):
                waiting.unregister(self.out)  # the program has closed it
            if self.control.fileno() in ready:
                said = self._said()
        os.set_blocking(self.out, False)
        with suppress(BlockingIOError):
            while len(printed) <= most and self._read(printed):
                pass
        os.set_blocking(self.out, True)
        if said not in (b"0", b"1") or len(printed) > most:
            self.end()
        return _answer(bytes(printed), "T" if hung and not said else said.decode(errors="replace"), limits)

    def _read(self, printed: bytearray) -> int:
        chunk = os.read(self.out, 65536)
        printed += chunk
        return len(chunk)

    def _said(self) -> bytes:
        try:
            return self.control.recv(4096) or GONE
        except OSError:
            return GONE

    @property
    def alive(self) -> bool:
        return self.handle >= 0

    def end(self) -> None:
        """Kill it with all that it has started."""
        if self.handle >= 0:
            with suppress(OSError):
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)
            os.close(self.handle)
            self.handle = -1
        if self.out >= 0:
            os.close(self.out)
            self.out = -1
        self.control.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.end()


def _answer(printed: bytes, said: str, limits: PythonLimits) -> Answer:
    r"""
    >>> _answer(b"42", "1", PythonLimits()), _answer(b"", "D", PythonLimits())
    ('42', '(no output)')
    >>> _answer(b"abc", "", PythonLimits(output_chars=2))
    'ab\n(cut: it printed more than 2 characters)'
    """
    text, status = printed.decode("utf-8", errors="replace").strip("\n"), "done"
    if len(text) > limits.output_chars:
        text = f"{text[: limits.output_chars]}\n(cut: it printed more than {limits.output_chars} characters)"
    if said.startswith("T"):
        said = f"DTimeoutError: stopped after {limits.wall_seconds:g} seconds"
    if not said.startswith(("1", "D")):
        status = "failed"
    elif said.startswith("D") and said[1:]:
        ending = " ".join(said[1:201].split())
        status = "timeout" if ending.startswith("TimeoutError") else "failed"
        text = f"{text}\n{ending}" if text else ending
    return Answer(text or NOTHING, status)


@cache
def _turns() -> threading.Semaphore:
    return threading.Semaphore(default_size())


def call(code: str, limits: PythonLimits, of: _Server | None = None) -> Answer:
    """One program in a process of its own. Raises `ToolError` where the machine gives none, and nothing else."""
    with _turns():
        program = Program(limits, (lambda: of) if of else lambda: server_for(code))
        try:
            return program.run(code)
        finally:
            program.end()


def python_many(codes: Sequence[str], limits: PythonLimits) -> list[Answer]:
    """The answers of several programs, in order; as many run at once as this process has cores."""
    return together([lambda code=code: call(code, limits) for code in codes])  # type: ignore[misc]


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each call gives, in order, several at a time in threads: calls of the Python tool and of sessions.

    >>> together([lambda: 1, lambda: 2])
    [1, 2]
    """
    if not calls:
        return []
    with ThreadPoolExecutor(min(len(calls), default_size()), thread_name_prefix="python tool") as threads:
        return list(threads.map(lambda one: one(), calls))


class PythonSession:
    """TRL's environment of one completion: names that a program sets are there for the completion's next call."""

    def __init__(self, limits: PythonLimits | None = None) -> None:
        self._limits = limits or PythonLimits(session=True)
        self._program: Program | None = None

    def reset(self, **row: Any) -> None:
        """Begin a new completion, without names. ``row``: the columns of the problem, which are not looked at."""
        if self._program is not None:
            self._program.end()
            self._program = None

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints. Names stay for the next call.

        Args:
            code: The program. The value of its last line is printed too.
        """
        lost = self._program is not None and not self._program.alive
        if self._program is None or lost:
            self._program = Program(self._limits, lambda: server_for(code))
        with _turns():
            answer = self._program.run(code)
        if lost:
            return Answer(f"(a new session: the last program was ended, its names are gone)\n{answer}", answer.status)
        return answer

    def __enter__(self) -> "PythonSession":
        return self

    def __exit__(self, *error: object) -> None:
        self.reset()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _turns.cache_clear()
    while _servers:
        _servers.popitem()[1].forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
