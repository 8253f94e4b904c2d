"""A command whose whole tree of processes ends with its owner, however either of them ends. Linux only.

`Kept` starts this file as a separate process, the keeper. The keeper starts the command in a new session, which the
terminal's Ctrl-C does not reach. Only the owner has the writing end of a pipe to the keeper. A byte in the pipe is the
number of a signal to pass on. The end of the pipe, also after the owner was killed, asks to end all processes. The
keeper is a subreaper (prctl(2)): a process that the command leaves behind, in any session, becomes a child of the
keeper, so no process escapes. When the command has ended, the keeper ends the other processes of the tree.

Does not help if the keeper itself is killed by SIGKILL, or if a process cannot be killed (a hung GPU driver).
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

import psutil

PR_SET_CHILD_SUBREAPER = 36
KILLED = 10.0  # seconds until a process should be gone after SIGKILL


class Kept:
    """A command that runs until it ends, until `stop`, or until this process is gone.

    ``module``: the Python module whose processes get the signals of `send`; ``grace``: seconds that the
    command has after SIGTERM. The processes that it leaves get two more, then SIGKILL.

    >>> kept = Kept([sys.executable, "-c", "raise SystemExit(3)"])
    >>> kept.wait(), kept.running
    (3, False)
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        output: IO[Any] | None = None,
        module: str = "",
        grace: float = 10.0,
    ) -> None:
        theirs, self._pipe = os.pipe()
        keeper = [sys.executable, __file__, str(theirs), str(grace), module, *command]
        try:
            self.process = subprocess.Popen(
                keeper,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                pass_fds=[theirs],
                start_new_session=True,
            )
        finally:
            os.close(theirs)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def send(self, number: int) -> None:
        """Send the signal to the processes that run ``module``. If no process runs it, end the tree as `stop` does."""
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._pipe, bytes([number]))

    def wait(self, timeout: float | None = None) -> int:
        """Return the command's exit code, or 128 + n if signal n ended it.

        Raises `subprocess.TimeoutExpired` after ``timeout``.
        """
        code = self.process.wait(timeout)
        return 128 - code if code < 0 else code

    def stop(self) -> int:
        """End the whole tree, if it has not ended, and return the exit code. May be called twice."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        return self.wait()


# The keeper's side. This file runs by its path, so that the package is not imported for it.


def main(argv: list[str]) -> int:
    pipe, grace, module, command = int(argv[0]), float(argv[1]), argv[2], argv[3:]
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the command would inherit
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.set_inheritable(pipe, False)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        started = psutil.Popen(command, start_new_session=True)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    with contextlib.suppress(KeyboardInterrupt):
        ended = os.pidfd_open(started.pid)
        while not select.select([pipe, ended], [], [])[0].count(ended):
            if not (asked := os.read(pipe, 1)) or not send(module, asked[0]):
                break  # without such a process, not started yet or gone, there is nothing to finish
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end([started], signal.SIGTERM, grace)  # the command first, so that it can end its children
    _end(_tree(started), signal.SIGTERM, 2.0)
    until = time.monotonic() + KILLED
    while (tree := _tree(started)) and time.monotonic() < until:
        _end(tree, signal.SIGKILL, 0.1)
    code = started.poll()
    return 128 + signal.SIGKILL if code is None else 128 - code if code < 0 else code


def _tree(started: psutil.Popen) -> list[Any]:
    """Return the living processes below this one; the command as ``started``, which keeps its exit code."""
    others = [process for process in psutil.Process().children(recursive=True) if process != started]
    return [process for process in (started, *others) if process.is_running()]


def _end(processes: Sequence[Any], number: signal.Signals, seconds: float) -> None:
    """Send a signal to processes, and wait until they have ended, which also reaps adopted processes."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
    psutil.wait_procs(processes, timeout=seconds)


def send(module: str, number: int) -> bool:
    """Send a signal to the processes below this one whose command is ``python -m module``, but not to forks of them.

    Return False if no process runs it.
    """
    matching = {process for process in psutil.Process().children(recursive=True) if _module(process) == module}
    for process in matching:
        with contextlib.suppress(psutil.Error):
            if process.parent() not in matching:
                process.send_signal(number)
    return bool(matching)


def _module(process: psutil.Process) -> str:
    """Return the module that a process runs, the word after the first -m of its command; "" if it has no -m."""
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        return words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
