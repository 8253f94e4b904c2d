"""The Python tool: run a program in a sandboxed process that shares nothing with the trainer, and return its output.

A call forks a warm server twice (server.py). A supervisor process measures the program. This module sends the program
and receives an answer of limited length. Any thread may call.

Does not set up the sandbox: sandbox.py does.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.errors import UserError
from grpo_math.grading.workers import default_size
from grpo_math.tools import sandbox
from grpo_math.tools.limits import PythonLimits
from grpo_math.tools.syscalls import machine

START_SECONDS = 60.0  # for the server, which imports numpy and sympy, and for a program's process
PAUSES = (0.2, 1.0, 5.0)  # seconds between attempts to get a process for a program
PACKAGES = ("numpy", "sympy", "mpmath")
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
# The server gets no other variable of the trainer's environment. Hashes are the same in all programs, so that a run
# can be repeated.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class ToolError(UserError, RuntimeError):
    """The Python tool cannot start a program: a fault of the machine, not of the program."""


class Answer(str):
    """The result of a call; ``status`` is ``done``, ``failed`` (the program raised or died) or ``timeout``."""

    status: str

    def __new__(cls, text: str, status: str) -> "Answer":
        answer = super().__new__(cls, text)
        answer.status = status
        return answer


class Server(NamedTuple):
    """The process that programs are forked from, and the socket on which it takes requests."""

    process: subprocess.Popen[bytes]
    requests: socket.socket


# By process id, because a fork must not use its parent's server, and by whether numpy and sympy are imported. Forking a
# process with sympy takes five times as long; importing sympy takes a hundred times as long.
_servers: dict[tuple[int, bool], Server] = {}
_lock = threading.Lock()


def server(packages: bool = False) -> Server:
    """Return the server of this process. It is started on first use, and again if it has died."""
    with _lock:
        current = _servers.get((os.getpid(), packages))
        if current is None or current.process.poll() is not None:
            current = _servers[os.getpid(), packages] = _start_server(PACKAGES if packages else ())
        return current


def _start_server(packages: Sequence[str]) -> Server:
    if sys.platform != "linux" or machine() is None:
        raise ToolError("the Python tool needs Linux on x86-64 or ARM64: leave python out of tools")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(START_SECONDS)
    command = [sys.executable, "-s", "-P", "-B", "-m", "grpo_math.tools.server"]
    command += map(json.dumps, (readable_folders(), sandbox.layers(), packages))
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *_package_folders()])
    try:
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={**ENVIRONMENT, "TMPDIR": tempfile.gettempdir(), "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C reaches only the trainer, which finishes its step
            )
        if ours.recv(1):
            return Server(process, ours)
        raise OSError("its process ended")
    except OSError as error:
        remedy = f"end other programs, and try {sys.executable} -c 1"
        raise ToolError(f"the Python tool cannot start: {error}: {remedy}") from None


def readable_folders() -> list[str]:
    """Return the folders that a program can read: the libraries of the interpreter and of the system."""
    prefixes = [f"{prefix}/{name}" for prefix in (sys.prefix, sys.base_prefix) for name in ("lib", "lib64")]
    paths = [path for path in dict.fromkeys([*SYSTEM, *prefixes, *_package_folders()]) if os.path.isdir(path)]
    return [path for path in paths if not any(path.startswith(f"{other}/") for other in paths)]


def _package_folders() -> list[str]:
    specs = [importlib.util.find_spec(name) for name in PACKAGES]
    files = [Path(spec.origin) for spec in specs if spec and spec.origin]
    # An environment may consist of links into an installer's cache.
    return list(dict.fromkeys(str(path.parents[1]) for file in files for path in (file, file.resolve())))


class PythonSession:
    """TRL's environment of one completion: the variables of a program stay for the completion's next call."""

    def __init__(self, limits: PythonLimits | None = None) -> None:
        self._limits = limits or PythonLimits(session=True)
        self._process: socket.socket | None = None  # its supervisor

    def reset(self, **row: Any) -> None:
        """Begin a new completion, without variables. The columns of the problem, ``row``, are ignored."""
        if self._process is not None:
            with suppress(OSError):
                self._process.shutdown(socket.SHUT_RDWR)  # a forked process may have a copy of the socket
            self._process.close()
            self._process = None

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints. Names stay for the next call.

        Args:
            code: The program. The value of its last line is printed too.
        """
        lost = self._process is not None and self._process.fileno() < 0
        if self._process is None or lost:
            self._process = _start(self._limits, any(name in code for name in PACKAGES))
        self._process.settimeout(self._limits.wall_seconds + START_SECONDS)
        reply = _ask(self._process, json.dumps(code)) or ("the program's process is gone", "failed", False)
        if not reply[2]:
            self._process.close()
        note = "(new session: the last program was ended, its variables are lost)\n" if lost else ""
        return Answer(note + reply[0], reply[1])

    def __enter__(self) -> "PythonSession":
        return self

    def __exit__(self, *error: object) -> None:
        self.reset()

    __del__ = reset


def _start(limits: PythonLimits, packages: bool) -> socket.socket:
    """Return the socket of a new program's supervisor. Raises `ToolError` if the machine has no process for it."""
    request = json.dumps(asdict(limits)).encode()
    for pause in (*PAUSES, 0.0):
        ours, theirs = socket.socketpair()
        ours.settimeout(START_SECONDS)
        error = None
        with suppress(OSError), theirs:
            socket.send_fds(server(packages).requests, [request], [theirs.fileno()])
            theirs.close()
            error = _ask(ours)
        if error == "":
            return ours
        ours.close()
        time.sleep(pause)
    raise ToolError(f"a program of the Python tool cannot be started: {error or 'no process'}: end other programs")


def _ask(process: socket.socket, line: str = "") -> Any:
    """Send a call if ``line`` is not empty. Return the next message, or None if the process has ended."""
    with suppress(OSError, ValueError):
        process.sendall(f"{line}\n".encode() if line else b"")
        return json.loads(process.makefile().readline())
    return None


def call(code: str, limits: PythonLimits) -> Answer:
    """Run one program in a separate process. Raises `ToolError` if the machine has no process for it."""
    with PythonSession(limits) as session:
        return session.python(code)  # type: ignore[return-value]


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run the calls in threads, one per core of this process, and return their results in order.

    >>> together([lambda: 1, lambda: 2])
    [1, 2]
    """
    with ThreadPoolExecutor(default_size(), thread_name_prefix="python tool") as threads:
        return list(threads.map(lambda call: call(), calls))
