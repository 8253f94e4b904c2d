"""A command whose whole tree of processes ends with its owner, however either of them ends. Linux only.

`Kept` starts this file as a process of its own, the keeper, and the keeper starts the command in a new session, out of
reach of the terminal's Ctrl-C. Between owner and keeper is a pipe whose writing end only the owner has: a byte is the
number of a signal to pass on, and its end, also when the owner was killed, asks to end everything. The keeper is a
subreaper (prctl(2)): what the command leaves behind, in whatever session, becomes a child of the keeper's, so that
nothing escapes it. Whatever remains of the tree once the command has ended is ended too.

Does not help where the keeper itself is killed by SIGKILL, or where a process cannot be killed (a hung GPU driver).
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

PR_SET_CHILD_SUBREAPER = 36
KILLED = 10.0  # seconds in which what got SIGKILL should be gone


class Kept:
    """A command that runs until it ends, until `stop`, or until this process is gone.

    ``module``: the Python module whose processes get the signals of `send`; ``grace``: seconds that the
    command has after SIGTERM. What it leaves has two more, and then SIGKILL.

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
        """The signal to the processes that run ``module``, and to no other; without any, `stop`."""
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._pipe, bytes([number]))

    def wait(self, timeout: float | None = None) -> int:
        """The command's exit code, 128 + n if signal n ended it; `subprocess.TimeoutExpired` after ``timeout``."""
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
    signal.signal(signal.SIGTERM, _raise)
    os.set_inheritable(pipe, False)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        started = subprocess.Popen(command, start_new_session=True)  # held: a Popen that is dropped reaps its child
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    child, codes = started.pid, dict[int, int]()
    with contextlib.suppress(_Terminated):
        ended = os.pidfd_open(child)
        while not select.select([pipe, ended], [], [])[0].count(ended):
            if not (asked := os.read(pipe, 1)) or not send(module, asked[0]):
                break  # without such a process, not started yet or gone, there is nothing to finish
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _reap(codes)
    for number, whole, seconds in (
        (signal.SIGTERM, False, grace),  # the command first, so that it can end its own
        (signal.SIGTERM, True, 2.0),
        (signal.SIGKILL, True, KILLED),
    ):
        sent, until = set[int](), time.monotonic() + seconds
        while (tree := _tree()) and (whole or child in tree) and time.monotonic() < until:
            for pid in tree if whole else [child]:  # SIGTERM once: at a second one some leave without clearing up
                if pid not in sent or number == signal.SIGKILL:
                    _kill(pid, number)
                sent.add(pid)
            time.sleep(0.02)
            _reap(codes)
    code = codes.get(child, 128 + signal.SIGKILL)
    return 128 - code if code < 0 else code


class _Terminated(BaseException):
    """SIGTERM has come."""


def _raise(*_: Any) -> None:
    raise _Terminated


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _reap(codes: dict[int, int]) -> None:
    """Take leave of every child that has ended, adopted ones too."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            codes[found[0]] = os.waitstatus_to_exitcode(found[1])


def _tree() -> dict[int, int]:
    """pid -> parent of every living process below this one."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    parents[int(name)] = int(parent)

    def below(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return {pid: parent for pid, parent in parents.items() if pid != os.getpid() and below(parent)}


def send(module: str, number: int) -> bool:
    """The signal to the processes below this one whose command is ``python -m module``, not to those that they forked;
    False where there is none."""
    tree = _tree()
    found = {pid for pid in tree if _module(pid) == module}
    for pid in found:
        if tree[pid] not in found:
            _kill(pid, number)
    return bool(found)


def _module(pid: int) -> str:
    """What follows the first -m of a process's command, where the interpreter's options are."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return words[words.index("-m") + 1] if "-m" in words[:-1] else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
