"""A command whose whole tree of processes ends with its owner, however either of them ends. Linux only.

`SupervisedCommand` starts this file as a separate process, the supervisor.
The supervisor starts the command in a new session, which the terminal's Ctrl-C does not reach. Only the owner has the
writing end of the supervisor's stdin. When this pipe closes, also because the owner was killed, the supervisor ends all
processes. The supervisor is a subreaper (prctl(2)): a process that the command leaves behind, in any session, becomes a
child of the supervisor, so no process escapes. After the command, the supervisor ends the other processes of the tree.

It is ours because no library ends a tree whose owner was killed: subprocess and psutil need a living owner, and systemd
or a container is not everywhere.

Does not help if the supervisor itself is killed by SIGKILL, or if a process cannot be killed (a hung GPU driver).
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


class SupervisedCommand:
    """A command that runs until it ends, until `stop`, or until this process ends.

    ``grace``: seconds that the command has after SIGTERM. The processes that it leaves get SIGKILL.

    >>> process = SupervisedCommand([sys.executable, "-c", "raise SystemExit(3)"])
    >>> process.wait(), process.running
    (3, False)
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        output: IO[Any] | None = None,
        grace: float = 10.0,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(grace), *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            # Ctrl-C in the terminal reaches only the owner, which decides when the tree ends.
            start_new_session=True,
        )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def wait(self, timeout: float | None = None) -> int:
        """Return the command's exit code, or 128 + n if signal n ended it.

        Raises `subprocess.TimeoutExpired` after ``timeout``.
        """
        return exit_code(self.process.wait(timeout))

    def end(self) -> None:
        """Ask the supervisor to end the whole tree, and do not wait for that."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def stop(self) -> int:
        """End the whole tree, if it has not ended, and return the exit code. May be called twice."""
        self.end()
        return self.wait()


def exit_code(returned: int) -> int:
    """Return the exit code of a shell for what `subprocess` returns.

    >>> exit_code(2), exit_code(-9)
    (2, 137)
    """
    return 128 - returned if returned < 0 else returned


def send(module: str, number: int) -> bool:
    """Send a signal to the processes below this one whose command is ``python -m module``, but not to forks of them.

    Return False if no process runs it.
    """
    matching = {process for process in psutil.Process().children(recursive=True) if _runs(process, module)}
    for process in matching:
        with contextlib.suppress(psutil.Error):
            # A fork has the command line of its parent, and nothing to save.
            if process.parent() not in matching:
                process.send_signal(number)
    return bool(matching)


def _runs(process: psutil.Process, module: str) -> bool:
    """Return True for ``python -m module``, also with torchrun's -u. The supervisor has the -m of its command too, but
    behind its own file."""
    with contextlib.suppress(psutil.Error):
        return [word for word in process.cmdline()[1:4] if word != "-u"][:2] == ["-m", module]
    return False


# The supervisor's side. This file runs by its path, so that the package is not imported for it.


def main(argv: list[str]) -> int:
    grace, command = float(argv[0]), argv[1:]
    # These signals are for the command (`send`). By default they would end the supervisor.
    # Not SIG_IGN, which the command would inherit.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    started = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    with contextlib.suppress(KeyboardInterrupt):
        # Wait for the end of the owner's pipe, for the end of the command, or for SIGTERM.
        select.select([sys.stdin, os.pidfd_open(started.pid)], [], [])
    # A second SIGTERM must not interrupt the rest, which would leave processes behind.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    started.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        started.wait(grace)
    started.kill()
    started.wait()
    until = time.monotonic() + KILLED
    # The kill is repeated: killed processes hand their children to this one, and a process may fork before it is
    # killed.
    while (tree := psutil.Process().children(recursive=True)) and time.monotonic() < until:
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(tree, timeout=0.1)
    return exit_code(started.returncode)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
