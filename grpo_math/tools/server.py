"""The processes behind the Python tool: a warm server, and for each call a supervisor and the program's process.

``python -m grpo_math.tools.server [PATHS, PACKAGES]`` is the server. It never had the trainer's memory or environment.
It imports the packages once and then takes calls on its standard input, a socket. A call is the socket of a new
conversation with the trainer. The server exits when the trainer's end of its standard input is closed.

For each call the server forks a supervisor, which reads the program and its limits (one JSON line), forks the program's
process, and kills it if it exceeds a limit. The supervisor sends one line if no program could be started: the error.
Else it sends two lines: an empty text, and later the answer with its status.

sandbox.py restricts the program.
"""

import gc
import importlib
import json
import os
import re
import signal
import socket
import stat
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

from grpo_math.tools import interpreter, sandbox

PACKAGES = ("numpy", "sympy", "mpmath")
CHECK = 0.1  # seconds between two checks of a program's folder and threads
FOLDER_MB, FILES, THREADS = sandbox.FILE_MB, 1024, 64
BLOCK = 65536  # bytes that are read at once
# Inode and path of a deleted file in /proc/PID/maps. It takes space while it is mapped into memory.
DELETED = re.compile(r"^(?:\S+ +){4}(\d+) +(.*) \(deleted\)$", re.MULTILINE)


def main() -> None:
    paths, packages = json.loads(sys.argv[1])
    calls = socket.socket(fileno=os.dup(0))
    # Read from the environment, which is emptied below.
    tempfile.gettempdir()
    # A call forks these imports. Importing sympy in each program would take a hundred times as long.
    for name in packages:
        with suppress(ImportError):  # a package that is not installed
            importlib.import_module(name)

    # A program must not find this process's folder or environment.
    sys.path[:] = [entry for entry in sys.path if any(f"{entry}/".startswith(f"{path}/") for path in paths)]
    os.environ.clear()
    # A forked program's collector ignores these objects, so their pages stay shared.
    gc.freeze()
    # A supervisor that ends leaves no zombie.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    calls.send(b"R")
    # The last message, after the trainer has closed its end, is empty and brings no file.
    while files := socket.recv_fds(calls, 16, 1)[1]:
        # If there is no process for the call, the trainer finds the socket closed.
        with socket.socket(fileno=files[0]) as trainer, suppress(OSError):
            if os.fork() == 0:
                calls.close()
                supervise(trainer, paths)


def supervise(trainer: socket.socket, paths: list[str]) -> NoReturn:
    """Run one program and send its answer. Does not return."""
    # With the server's SIG_IGN, the kernel would discard the exit status that `wait4` needs.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with suppress(OSError):  # the trainer has ended
        call = json.loads(trainer.makefile("rb").readline())
        try:
            with tempfile.TemporaryDirectory(prefix="grpo_math_python_") as folder:
                running = Program(call["code"], call["limits"], paths, folder)
                _send(trainer, "")
                _send(trainer, running.answer(trainer))
        except OSError as error:
            _send(trainer, str(error))
    os._exit(0)


def _send(trainer: socket.socket, message: Any) -> None:
    trainer.sendall(json.dumps(message).encode() + b"\n")


class Program:
    """The process of a program, as its supervisor sees it."""

    def __init__(self, code: str, limits: dict[str, Any], paths: list[str], folder: str) -> None:
        self.limits = limits
        self.folder = folder
        # `written` stays open here too: otherwise `wait` returns at once after the program has closed its output.
        self.out, self.written = os.pipe()
        # The program's process closes this pipe when it is in the sandbox. Only then does it read the program, so a
        # program cannot pretend that the sandbox has failed.
        errors, entered = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _run(code, limits, paths, folder, self.written, entered)
        os.close(entered)
        if error := os.read(errors, 4096):
            raise OSError(error.decode())
        # A pidfd can be waited for together with the pipe and the trainer's socket.
        self.ended = os.pidfd_open(self.pid)

    def answer(self, trainer: socket.socket) -> tuple[str, str]:
        """Return the program's output, followed by the limit or signal that ended it, and the status."""
        deadline = time.monotonic() + self.limits["wall_seconds"]
        # Characters and bytes: UTF-8 has at most 4 bytes for a character. One more shows that the limit is exceeded.
        limit, most = self.limits["output_chars"], 4 * self.limits["output_chars"] + 4
        printed, exceeded = b"", ""
        while not exceeded and len(printed) <= most:
            ready = wait([self.out, self.ended, trainer], CHECK)
            if self.out in ready:
                printed += os.read(self.out, BLOCK)
            # A trainer sends nothing after its call, so its socket is ready only when the trainer has ended.
            if self.ended in ready or trainer in ready:
                break
            exceeded = self._exceeded()
            if time.monotonic() > deadline:
                exceeded = f"TimeoutError: stopped after {self.limits['wall_seconds']:g} seconds"

        ending, status = self._end()
        os.close(self.written)  # the pipe now has an end
        while len(printed) <= most and (chunk := os.read(self.out, BLOCK)):
            printed += chunk
        if exceeded:
            ending, status = exceeded, "timeout" if exceeded.startswith("TimeoutError") else "failed"
        text = printed.decode("utf-8", errors="replace").strip("\n")
        if len(text) > limit or len(printed) > most:
            return f"{text[:limit]}\n(cut: it printed more than {limit} characters)", "failed"
        return "\n".join(filter(None, (text, ending))) or "(no output)", status

    def _end(self) -> tuple[str, str]:
        """Kill the program if it still runs. Return the signal or exit code that ended it, if any, and the status."""
        # Safe even if the program has ended: its number is not used again before `wait4`.
        os.kill(self.pid, signal.SIGKILL)
        _, status, used = os.wait4(self.pid, 0)
        code, limit = os.waitstatus_to_exitcode(status), self.limits["cpu_seconds"]
        if code in (0, interpreter.RAISED):
            return "", "failed" if code else "done"
        # The kernel sends SIGXCPU at the soft limit and SIGKILL at the hard limit, and both limits are equal.
        if code in (-signal.SIGKILL, -signal.SIGXCPU) and used.ru_utime + used.ru_stime > limit - 0.5:
            return f"TimeoutError: stopped after {limit} CPU seconds", "timeout"
        ending = f"with exit code {code}" if code > 0 else f"by signal {-code} ({signal.strsignal(-code)})"
        return f"the program was ended {ending}", "failed"

    def _exceeded(self) -> str:
        """Return the folder or thread limit that the program exceeds, or an empty string."""
        # The sandbox rejects new folders and symbolic links, so these are all files.
        names, memory = os.listdir(self.folder), ""
        files = [_stat(f"{self.folder}/{name}") for name in names]
        tasks = f"/proc/{self.pid}/task"
        threads = os.listdir(tasks)
        # A thread may have its own table of open files, and the main thread may have ended before the others.
        for thread in threads:
            with suppress(OSError):  # the thread has ended
                opened = [_stat(f"{tasks}/{thread}/fd/{number}") for number in os.listdir(f"{tasks}/{thread}/fd")]
                # A deleted file takes space until it is closed.
                files += [file for file in opened if file and stat.S_ISREG(file.st_mode) and not file.st_nlink]
                # All threads share their memory. A thread that has ended has none.
                memory = memory or Path(f"{tasks}/{thread}/maps").read_bytes().decode(errors="replace")
        sizes = {file.st_ino: file.st_size for file in files if file}
        deleted = DELETED.findall(memory)
        mapped = {int(inode) for inode, path in deleted if path.startswith(f"{self.folder}/")} - sizes.keys()
        limits = {
            f"{THREADS} threads": len(threads) > THREADS,
            f"{FILES} files in its folder": max(len(names), len(sizes)) > FILES,
            # The size of a file that is only mapped is not known, so the size is the largest possible.
            f"{FOLDER_MB} MB in its folder": (
                sum(sizes.values()) + len(mapped) * (sandbox.FILE_MB << 20) > FOLDER_MB << 20
            ),
        }
        return next((f"the program was ended: more than {limit}" for limit, over in limits.items() if over), "")


def _stat(path: str) -> os.stat_result | None:
    with suppress(OSError):  # deleted or closed meanwhile
        return os.stat(path)
    return None


def _run(code: str, limits: dict[str, Any], paths: list[str], folder: str, out: int, entered: int) -> NoReturn:
    """Enter the sandbox and run the program. Does not return."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for number, file in enumerate((null, out, null, entered)):
            os.dup2(file, number)
        # Among the inherited descriptors is the trainer's socket: a program could send its own answer.
        os.closerange(4, 4096)
        sandbox.enter(limits, paths, folder)
        os.close(3)
        os._exit(interpreter.run(code))
    except OSError as error:
        os.write(3, str(error).encode())
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
