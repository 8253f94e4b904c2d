"""The program that programs are forked from: a clean process, which never had the trainer's memory or environment.

``python -m grpo_math.tools.server PARENT_PID SOCKET PATHS WITHOUT PACKAGES``: it imports the packages once, says which
layers of the walls there are, and then takes requests on the socket: limits as JSON, with two files, the program's own
socket and the pipe for what it prints. For each it forks a keeper, which puts up the namespaces, forks the program's
process, hands a handle of that process to the trainer, and says in the end how it ended.

Does not keep the wall clock and does not read what is printed: the trainer's end does (python.py).
"""

import gc
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from typing import Any

from grpo_math.grading.worker import end_with
from grpo_math.tools import confine, program

PREPARED = ("itertools", "fractions", "decimal", "collections", "math")
REQUEST = 4096


def main() -> None:
    parent, fd = int(sys.argv[1]), int(sys.argv[2])
    paths, without, packages = map(json.loads, sys.argv[3:])
    end_with(parent)
    requests = socket.socket(fileno=fd)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    layers = confine.available(paths, without)
    layers["folder"] = "" if layers["spaces"] else tempfile.mkdtemp(prefix="grpo_math_tool_")  # the trainer removes it
    if layers["folder"]:
        os.chmod(layers["folder"], 0o711)
    for name in (*PREPARED, *packages):
        with suppress(Exception):
            importlib.import_module(name)
    # No program finds this one's folder or environment.
    sys.path[:] = [entry for entry in sys.path if entry in paths or any(entry.startswith(f"{p}/") for p in paths)]
    os.environ.clear()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever ends is gone
    requests.send(json.dumps(layers).encode())
    while True:
        request, files, _, _ = socket.recv_fds(requests, REQUEST, 2)
        if not request:
            return
        with suppress(OSError):  # the system gives no process: the trainer finds its socket closed
            if os.fork() == 0:
                requests.close()
                try:
                    _keep(json.loads(request), layers, paths, socket.socket(fileno=files[0]), files[1])
                finally:
                    os._exit(0)
        for file in files:
            os.close(file)


def _keep(limits: dict[str, Any], layers: dict[str, Any], paths: list[str], control: socket.socket, out: int) -> None:
    """Fork the program, hand it over, wait for its end and say how it came."""
    confine.libc.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder = confine.FOLDER if layers["spaces"] else tempfile.mkdtemp(dir=layers["folder"])
    ready, says = os.pipe()
    pid = 0
    try:
        limits |= {"held": _held(), "user": confine.STRANGER + os.getpid()}
        with open("/proc/self/oom_score_adj", "w") as score:  # where memory runs out, this goes first
            score.write("1000")
        if layers["spaces"]:
            confine.separate(layers["spaces"], paths)
        pid = os.fork()
        if pid == 0:
            _program(limits, layers, paths, folder, control, out, says)
        os.close(says)
        os.close(out)
        handle = os.pidfd_open(pid)
        said = os.read(ready, REQUEST)
        socket.send_fds(control, [said or b"Eit ended while starting"], [handle])
        _, status, used = os.wait4(pid, 0)
        with suppress(OSError):
            control.send(b"D" + _ending(status, used.ru_utime + used.ru_stime, limits).encode())
    except OSError as error:
        with suppress(OSError):
            control.send(b"E" + str(error).encode())
        if pid:
            os.kill(pid, signal.SIGKILL)
    finally:
        if not layers["spaces"]:
            shutil.rmtree(folder, ignore_errors=True)


def _ending(status: int, seconds: float, limits: dict[str, Any]) -> str:
    """How a program ended that did not come to its end, for the model to read."""
    if os.WIFEXITED(status):
        return f"the program ended with exit code {code}" if (code := os.WEXITSTATUS(status)) else ""
    number = os.WTERMSIG(status)
    if number in (signal.SIGKILL, signal.SIGXCPU) and seconds > limits["cpu_seconds"] - 0.5:
        return f"TimeoutError: stopped after {limits['cpu_seconds']} CPU seconds"
    return f"the program was ended by signal {number} ({signal.strsignal(number)})"


def _program(
    limits: dict[str, Any], layers: dict[str, Any], paths: list[str], folder: str,
    control: socket.socket, out: int, says: int,
) -> None:  # fmt: skip
    """The program's process: its files, its walls, then what it is sent; does not return."""
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for number, file in enumerate((nothing, out, nothing)):
            os.dup2(file, number)
        kept = [os.dup2(control.fileno(), 60), os.dup2(says, 61)]
        os.closerange(3, 60)
        os.closerange(62, 4096)
        control.detach()
        control, says = socket.socket(fileno=os.dup2(kept[0], 3)), os.dup2(kept[1], 4)
        os.closerange(60, 62)
        confine.wall_in(layers, limits, paths, folder)
        os.write(says, b"R")
        os.close(says)
        program.serve(control)
        code = 0
    except BaseException as error:
        with suppress(OSError):
            os.write(says, f"E{error}".encode())
    finally:
        os._exit(code)


def _held() -> int:
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[0]) * os.sysconf("SC_PAGESIZE")


if __name__ == "__main__":
    main()
