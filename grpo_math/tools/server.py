"""The processes behind the Python tool: a server, and for each session a supervisor and the program's own process.

``python -m grpo_math.tools.server PATHS LAYERS PACKAGES`` is the server. It never had the trainer's memory or
environment. It imports the packages once and then takes requests on its standard input, a socket. A request is the
limits as JSON, with the socket of a session. The server exits when the trainer's end of the socket is closed.

For each request the server forks a supervisor, which forks the program's process, hands it the calls of the session,
and kills it if it exceeds a limit. A call is one JSON line from the trainer. The answer is one JSON line: the text, the
status, and whether the program's process is still running for the next call.

Does not restrict the program: sandbox.py does.
"""

import gc
import importlib
import json
import os
import signal
import socket
import stat
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, NoReturn

from grpo_math.tools import program, sandbox

PREPARED = ("itertools", "fractions", "decimal", "collections", "math")
CHECK = 0.1  # seconds between two checks of a program's folder and threads
FOLDER_MB, FILES, THREADS = sandbox.FILE_MB, 1024, 64
NOTHING = "(no output)"


def main() -> None:
    paths, layers, packages = map(json.loads, sys.argv[1:])
    requests = socket.socket(fileno=os.dup(0))
    tempfile.gettempdir()  # read from the environment, which is emptied below
    for name in (*PREPARED, *packages):
        with suppress(Exception):
            importlib.import_module(name)
    # A program must not find this process's folder or environment.
    sys.path[:] = [entry for entry in sys.path if any(f"{entry}/".startswith(f"{path}/") for path in paths)]
    os.environ.clear()
    gc.freeze()  # a forked program's collector ignores these objects, so their pages stay shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a supervisor that ends leaves no zombie
    requests.send(b"R")
    while True:
        request, files, _, _ = socket.recv_fds(requests, 4096, 1)
        if not request:
            return
        with socket.socket(fileno=files[0]) as session, suppress(OSError):  # no process: the trainer finds it closed
            if os.fork() == 0:
                requests.close()
                supervise(session, json.loads(request), layers, paths)


def supervise(session: socket.socket, limits: dict[str, Any], layers: dict[str, int], paths: list[str]) -> NoReturn:
    """Answer the calls of one session until the trainer or the program ends. Does not return."""
    folder, error = "", ""
    with suppress(OSError):
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            folder = tempfile.mkdtemp(prefix="grpo_math_python_")
            running = Program(session, limits, layers, paths, folder)
            _send(session, "")
            calls = session.makefile("rb")
            while running.waits_for_call() and (call := calls.readline()):
                _send(session, answer := running.answer(call))
                if not answer[2]:
                    break
            running.end()
        except OSError as reason:
            error = str(reason)
        _send(session, error)
    with suppress(OSError):
        os.execv("/bin/rm", ["rm", "-rf", folder])  # copes with any depth, unlike shutil.rmtree
    os._exit(0)


def _send(session: socket.socket, message: Any) -> None:
    session.sendall(json.dumps(message).encode() + b"\n")


class Program:
    """The process of a session's program, as its supervisor sees it."""

    def __init__(
        self, session: socket.socket, limits: dict[str, Any], layers: dict[str, int], paths: list[str], folder: str
    ) -> None:
        self.session, self.limits, self.folder = session, limits, folder
        self.control, theirs = socket.socketpair()
        # The program's end stays open here too: otherwise wait() returns at once after the program closes its output.
        self.out, self.written = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            _run(limits, layers, paths, folder, theirs, self.written)
        theirs.close()
        self.control.settimeout(limits["wall_seconds"])
        if error := self.control.recv(4096)[1:]:
            raise OSError(error.decode())

    def waits_for_call(self) -> bool:
        """Return True on the next call, or False if the program ends or exceeds a limit in between."""
        while not (ready := wait([self.session, self.control], CHECK)) and not self.exceeded():
            pass
        return self.session in ready

    def answer(self, call: bytes) -> tuple[str, str, bool]:
        """Return a program's output or the last line of its error, the status, and whether its process still runs."""
        deadline = time.monotonic() + self.limits["wall_seconds"]
        limit, most = self.limits["output_chars"], 4 * self.limits["output_chars"] + 4  # characters, bytes
        printed, ending = b"", ""
        reply: bytes | None = None
        with suppress(OSError):  # a program that has ended is noticed below
            self.control.sendall(call)
        while reply is None and not ending and len(printed) <= most:
            ready = wait([self.session, self.control, self.out], CHECK)
            printed += _read(self.out)
            if self.control in ready:
                reply = _read(self.control)
            elif self.session in ready:
                ending = "the trainer has ended"
            elif time.monotonic() > deadline:
                ending = f"TimeoutError: stopped after {self.limits['wall_seconds']:g} seconds"
            else:
                ending = self.exceeded()
        while len(printed) <= most and (chunk := _read(self.out)):
            printed += chunk
        text = printed.decode("utf-8", errors="replace").strip("\n")
        if len(text) > limit or len(printed) > most:
            return f"{text[:limit]}\n(cut: it printed more than {limit} characters)", "failed", False
        if reply:
            return text or NOTHING, "done" if reply == b"1" else "failed", True
        ending = ending or self.end()
        status = "timeout" if ending.startswith("TimeoutError") else "failed" if ending else "done"
        return "\n".join(filter(None, (text, ending))) or NOTHING, status, False

    def end(self) -> str:
        """Kill the program. Return how it had ended, or an empty string after exit code 0."""
        wait([os.pidfd_open(self.pid)], 1.0)  # a program that has closed its socket is about to end
        os.kill(self.pid, signal.SIGKILL)
        _, status, used = os.wait4(self.pid, 0)
        code, limit = os.waitstatus_to_exitcode(status), self.limits["cpu_seconds"]
        if code in (-signal.SIGKILL, -signal.SIGXCPU) and used.ru_utime + used.ru_stime > limit - 0.5:
            return f"TimeoutError: stopped after {limit} CPU seconds"
        if code >= 0:
            return f"the program ended with exit code {code}" if code else ""
        return f"the program was ended by signal {-code} ({signal.strsignal(-code)})"

    def exceeded(self) -> str:
        """Return the folder or thread limit that the program exceeds, or an empty string."""
        sizes: list[int] = []
        threads = 0
        with suppress(OSError):  # the program has ended
            threads = len(os.listdir(f"/proc/{self.pid}/task"))
            # A deleted file takes space until it is closed.
            for file in os.listdir(f"/proc/{self.pid}/fd"):
                opened = os.stat(f"/proc/{self.pid}/fd/{file}")
                sizes += [opened.st_size] if stat.S_ISREG(opened.st_mode) and not opened.st_nlink else []
        try:
            for _, folders, files, at in os.fwalk(self.folder):
                sizes += [0] * len(folders) + [_size(name, at) for name in files]
                if len(sizes) > FILES:
                    break
        except RecursionError:  # folders nested too deeply
            sizes = [0] * (FILES + 1)
        limits = {
            f"{THREADS} threads": threads > THREADS,
            f"{FILES} files in its folder": len(sizes) > FILES,
            f"{FOLDER_MB} MB in its folder": sum(sizes) > FOLDER_MB << 20,
        }
        return next((f"the program was ended: more than {limit}" for limit, over in limits.items() if over), "")


def _read(end: socket.socket) -> bytes:
    """Return the bytes that have arrived, or b"" if none have arrived or the program has ended."""
    with suppress(OSError):
        return end.recv(65536, socket.MSG_DONTWAIT)
    return b""


def _size(name: str, folder: int) -> int:
    with suppress(OSError):  # deleted meanwhile
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    return 0


def _run(
    limits: dict[str, Any],
    layers: dict[str, int],
    paths: list[str],
    folder: str,
    control: socket.socket,
    out: socket.socket,
) -> NoReturn:
    """Enter the sandbox and run the programs that arrive. Does not return."""
    try:
        null, channel = os.open(os.devnull, os.O_RDWR), os.dup(control.detach())
        for number, file in enumerate((null, out.fileno(), null, channel)):
            os.dup2(file, number)
        os.closerange(4, 4096)
        control = socket.socket(fileno=3)
        sandbox.enter(layers, limits, paths, folder)
        control.send(b"R")
        program.serve(control)
        os._exit(0)
    except OSError as error:
        control.send(f"E{error}".encode())
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
