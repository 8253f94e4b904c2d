"""The Python tool: run a program in a sandboxed process that shares nothing with the trainer, and return its output.

A call forks a warm server twice (server.py). A supervisor process measures the program. This module sends the program
and receives an answer of limited length. Nothing stays from call to call. Any thread may call.

sandbox.py sets up the sandbox.
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
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.errors import UserError
from grpo_math.tools.limits import PythonLimits
from grpo_math.tools.server import PACKAGES
from grpo_math.tools.syscalls import is_supported

# Time for the start of the server, which imports numpy and sympy, and for that of a program's process.
START_SECONDS = 60.0
# Seconds before each attempt to get a process for a program.
PAUSES = (0.0, 0.2, 1.0, 5.0)
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
# The server gets no other variable of the trainer's environment. Hashes are the same in all programs, so that a run
# can be repeated.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    # By default each thread reserves 64 MB, and the limit of memory would end a program with eight.
    "MALLOC_ARENA_MAX": "2",
}


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
    """The process that programs are forked from, and the socket on which it takes calls."""

    process: subprocess.Popen[bytes]
    calls: socket.socket


_servers: dict[tuple[str, ...], Server] = {}  # by the packages that they have imported
_lock = threading.Lock()


def server(packages: tuple[str, ...] = PACKAGES) -> Server:
    """Return the server of this process. It is started on first use, and again if it has died."""
    with _lock:
        if packages not in _servers or _servers[packages].process.poll() is not None:
            _servers[packages] = _start_server(packages)
        return _servers[packages]


def _start_server(packages: tuple[str, ...]) -> Server:
    if sys.platform != "linux" or not is_supported():
        raise ToolError("the Python tool needs Linux on x86-64 or ARM64: leave python out of tools")
    # Packets keep the calls of several threads apart, each with its one file descriptor.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(START_SECONDS)
    # -s and -P: no packages of the user, and no files of the current folder. -B: no .pyc files are written.
    folders = readable_folders(packages)
    command = [sys.executable, "-s", "-P", "-B", "-m", "grpo_math.tools.server", json.dumps([folders, packages])]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *_package_folders(packages)])
    try:
        # This process closes its copy: if the server dies, `recv` then returns before its timeout.
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={**ENVIRONMENT, "TMPDIR": tempfile.gettempdir(), "PYTHONPATH": path},
                # Ctrl-C reaches only the trainer, which finishes its step.
                start_new_session=True,
            )
        if ours.recv(1):
            return Server(process, ours)
        raise OSError("its process ended")
    except OSError as error:
        remedy = f"end other programs, and try {sys.executable} -c 1"
        raise ToolError(f"the Python tool cannot start: {error}: {remedy}") from None


def readable_folders(packages: tuple[str, ...]) -> list[str]:
    """Return the folders that a program can read: the libraries of the interpreter and of the system."""
    prefixes = [f"{prefix}/{name}" for prefix in (sys.prefix, sys.base_prefix) for name in ("lib", "lib64")]
    return [path for path in (*SYSTEM, *prefixes, *_package_folders(packages)) if os.path.isdir(path)]


def _package_folders(packages: tuple[str, ...]) -> list[str]:
    """Return the folders that contain the installed ones of some packages."""
    specs = map(importlib.util.find_spec, packages)
    files = [Path(spec.origin) for spec in specs if spec and spec.origin]
    # An environment may consist of links into an installer's cache.
    return list(dict.fromkeys(str(path.parents[1]) for file in files for path in (file, file.resolve())))


def call(code: str, limits: PythonLimits, packages: tuple[str, ...] = PACKAGES) -> Answer:
    """Run one program in a separate process. Raises `ToolError` if the machine has no process for it."""
    request = json.dumps({"code": code, "limits": asdict(limits)}).encode() + b"\n"
    for pause in PAUSES:
        time.sleep(pause)
        replies = _ask(server(packages), request, limits.wall_seconds + START_SECONDS)
        if replies[1:]:
            return Answer(*replies[1])
        # The program was started, and its supervisor ended without an answer. Only a failed start is repeated.
        if replies == [""]:
            return Answer("the program's process has ended", "failed")
    error = replies[0] if replies else "no process"
    raise ToolError(f"a program of the Python tool cannot be started: {error}: end other programs")


def _ask(server: Server, request: bytes, seconds: float) -> list[Any]:
    """Send a call to a new supervisor. Return what it sends until it ends, or an empty list without a supervisor."""
    ours, theirs = socket.socketpair()
    with ours, suppress(OSError, ValueError):
        ours.settimeout(seconds)
        # This process closes its copy: the replies then end when the supervisor ends.
        with theirs:
            socket.send_fds(server.calls, [b"call"], [theirs.fileno()])
        ours.sendall(request)
        return [json.loads(line) for line in ours.makefile()]
    return []
