"""Do the walls of the Python tool hold on this machine? A program inside tries each, against this very process.

A wall holds where every attempt on it has failed, by whatever layer: a container may have no namespaces and lose
nothing by it.

Does not put up a wall: confine.py does.
"""

import dataclasses
import json
import os
import socket
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.errors import UserError
from grpo_math.tools.limits import PythonLimits
from grpo_math.tools.python import _Server, call, server

ATTEMPTS = """
import ctypes, fcntl, json, os, resource, socket, sys
pid, port, name, secret, memory, processes, shared = json.loads({facts!r})
libc = ctypes.CDLL(None)
beside = os.path.join(os.path.dirname(secret), "written")

def connect(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as one:
        one.settimeout(2)
        one.sendto(b"x", address) if kind == socket.SOCK_DGRAM else one.connect(address)

def write(path):
    with open(path, "x"):
        os.unlink(path)

def children():
    alive = []
    try:
        while len(alive) < processes:
            found = os.fork()
            if not found:
                import time
                time.sleep(60)
                os._exit(0)
            alive.append(found)
    finally:
        for one in alive:
            os.kill(one, 9)

def start():
    _, status = os.waitpid(os.posix_spawn("/proc/self/exe", ["python", "-c", "1"], {{}}), 0)
    assert status == 0

def look(length=8):
    class Part(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    into = ctypes.create_string_buffer(length)
    mine, theirs = Part(ctypes.addressof(into), length), Part(0, length)
    libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
    assert ctypes.get_errno() == 14  # a wrong address: whether it may look is asked before

def attach():
    assert libc.ptrace(0x4206, pid, 0, 0) == 0

libc = ctypes.CDLL(None, use_errno=True)
tries = {{
    "network": [lambda: connect(socket.AF_INET, ("127.0.0.1", port)), lambda: connect(socket.AF_UNIX, name),
                lambda: connect(socket.AF_INET, ("127.0.0.1", port), socket.SOCK_DGRAM)],
    "files": [lambda: open(secret).close(), lambda: write(beside), lambda: os.truncate(secret, 0),
              lambda: os.chmod(secret, 0o600), lambda: os.listdir(os.path.dirname(secret)), lambda: write(shared),
              lambda: open("/etc/passwd").close()],
    "processes": [children, start],
    "memory": [lambda: bytearray(memory)],
    "trainer": [lambda: open(f"/proc/{{pid}}/environ").close(), lambda: open(f"/proc/{{pid}}/mem").close(),
                lambda: open(f"/proc/{{pid}}/cmdline").close(), lambda: next(iter(os.environ)), look, attach],
    "signals": [lambda: os.kill(pid, 0), lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE),
                lambda: os.setpriority(os.PRIO_PROCESS, pid, 19), lambda: fcntl.fcntl(1, fcntl.F_SETOWN, pid)],
}}
through = {{}}
for wall, attempts in tries.items():
    through[wall] = 0
    for attempt in attempts:
        try:
            attempt()
            through[wall] += 1
        except BaseException:
            pass
print(json.dumps(through))
"""
MEANING = {
    "network": "a program can open connections",
    "files": "a program can read or change files that are not its own",
    "processes": "a program can start more processes than it may",
    "memory": "a program can take more memory than it may",
    "trainer": "a program can look into the trainer's memory, environment or command line",
    "signals": "a program can signal or slow down the trainer",
}

TRUNCATION = 3  # the first version of Landlock that a file opened for reading cannot be emptied under


class Wall(NamedTuple):
    """``said``: what holds it, or what a program can do."""

    name: str
    holds: bool
    said: str


@cache
def walls(limits: PythonLimits, of: _Server | None = None) -> list[Wall]:
    """Each wall, tried. Raises `ToolError` where no program can be started.

    >>> {wall.name for wall in walls(PythonLimits())} == set(MEANING)
    True
    """
    tried = of or server()
    by = layers(tried.layers)
    through = _attempts(limits, tried)
    if not tried.layers["spaces"] and tried.layers["landlock"] < TRUNCATION:
        through["files"] = 1  # not tried: it would empty a file of the interpreter
    return [
        Wall(name, not through.get(name, 1), f"held by {by}" if through.get(name, 1) == 0 else said)
        for name, said in MEANING.items()
    ]


def _attempts(limits: PythonLimits, tried: _Server) -> dict[str, int]:
    """How many attempts on each wall came through; empty where the program did not come to its end."""
    limits = dataclasses.replace(limits, wall_seconds=30.0, cpu_seconds=10, output_chars=2000, session=False)
    name = f"\0grpo_math_{os.getpid()}_{os.urandom(4).hex()}"
    shared = f"/dev/shm/grpo_math_{os.urandom(8).hex()}"
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as local,
    ):
        os.chmod(folder, 0o777)
        secret = Path(folder, "secret")
        secret.touch()
        local.bind(name)
        local.listen()
        memory = (limits.memory_mb + 64) << 20
        facts = [os.getpid(), tcp.getsockname()[1], name, str(secret), memory, limits.processes, shared]
        said = call(ATTEMPTS.format(facts=json.dumps(facts)), limits, tried)
    try:
        found: dict[str, int] = json.loads(said)
    except ValueError:
        return {}
    return found


def layers(there: dict[str, Any]) -> str:
    """
    >>> layers({"spaces": "user", "landlock": 7, "seccomp": True}), layers({"spaces": "", "landlock": 0, "seccomp": 0})
    ('namespaces, Landlock 7, seccomp, limits', 'limits')
    """
    names = {"spaces": "namespaces", "landlock": f"Landlock {there['landlock']}", "seccomp": "seccomp"}
    return ", ".join([*(said for layer, said in names.items() if there[layer]), "limits"])


def refuse_without(limits: PythonLimits, of: _Server | None = None) -> list[str]:
    """Raise a `UserError` unless every wall holds; with ``walls: any`` the lines of those that do not."""
    missing = [wall for wall in walls(limits, of) if not wall.holds]
    if missing and limits.walls == "all":
        said = "; ".join(wall.said for wall in missing)
        remedy = "run on a kernel with Landlock and seccomp, or accept that with python: {walls: any}"
        raise UserError(f"the walls of the Python tool do not all hold here ({said}): {remedy}")
    return [f"the Python tool's wall of {wall.name} does not hold: {wall.said}" for wall in missing]
