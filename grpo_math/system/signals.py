"""Signals that ask a run to stop, and the exit code that tells how the run ended.

    SIGINT, which is Ctrl-C   the step is finished and saved, exit code 130; a second one ends the run at once
    SIGTERM, SIGUSR1, SIGHUP  the step is finished and saved, exit code 75: start the same command again

SIGHUP comes when a connection drops. A run that was started with `nohup` ignores it.

More signals of the second kind change nothing: SLURM, srun and torch's agent may each send one. While there is no step
to finish (torch is imported, weights load, problems are evaluated) a signal ends the run at once, with the same code.

Imports nothing that takes time, so that signals are handled from the first moment. log.py saves, and all ranks agree
there.
"""

import os
import signal
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from grpo_math.system.replaced import replaced

EX_TEMPFAIL = 75  # EX_TEMPFAIL of sysexits.h: the same command resumes the run
EX_UNAVAILABLE = 69  # EX_UNAVAILABLE: another rank, or the vLLM server, was lost
INTERRUPTED = 130
UNFINISHED = b"error: training ended with exit code 0 before it was finished: look for os._exit in what it calls\n"
# Python leaves SIGHUP as it was at the start, so the ranks, which inherit it, decide alike.
HANGUP = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
STOPPING = (signal.SIGTERM, signal.SIGUSR1, *HANGUP)


def leave_lost_terminal() -> None:
    """Send output to /dev/null if the terminal hung up: each write would raise, before the run is saved."""
    for number in (1, 2):
        with suppress(OSError):
            # A terminal that hung up is still a character device, but isatty() returns False. Files and pipes stay.
            if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)


@contextmanager
def no_silent_exit() -> Iterator[None]:
    """End with exit code 1 and a line if something in this process, such as a reward, calls ``os._exit(0)``.

    A script or a SLURM job would take exit code 0 for a finished run.
    """
    leave, pid = os._exit, os.getpid()

    def leave_aloud(status: int) -> NoReturn:
        if status == 0 and os.getpid() == pid:  # a forked process may end like this
            os.write(2, UNFINISHED)
            status = 1
        leave(status)

    with replaced(os, _exit=leave_aloud):
        yield


@contextmanager
def handling(numbers: Collection[signal.Signals], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle these signals in the block. The earlier handlers come back afterwards."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def ended_by_signals(code: int) -> Iterator[None]:
    """End the block by `SystemExit` with this exit code at a signal, so that it stops what it has started."""

    def leave(number: int, frame: Any) -> None:
        leave_lost_terminal()
        # A further signal must not interrupt what the block stops.
        for each in STOPPING:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(code)

    with handling(STOPPING, leave):
        yield


def end_at_once(number: int, frame: Any) -> None:
    """End the process with the signal's code. During imports an exception may be caught, or leave a half module."""
    os._exit(INTERRUPTED if number == signal.SIGINT else EX_TEMPFAIL)


class Stopped(SystemExit):
    """A signal of `STOPPING` arrived when there was no step to finish."""


class Stop:
    """The request to stop this process.

    ``code``: the exit code of the request, 0 without one; ``heeded``: the run has ended after a step because of it.
    """

    def __init__(self) -> None:
        self.code = 0
        self.heeded = False
        self._finishes = False  # a step is under way
        self._pid = os.getpid()

    def begin(self) -> None:
        """Finish the current step on a signal from here on."""
        self._finishes = True

    def end(self) -> None:
        """End the run on a signal from here on, also for one that came after the last step."""
        if self.heeded:
            return  # only the message is left to print
        self._finishes = False
        if self.code:
            raise KeyboardInterrupt if self.code == INTERRUPTED else Stopped(EX_TEMPFAIL)

    def on_stop(self, number: int, frame: FrameType | None) -> None:
        leave_lost_terminal()
        # A forked helper inherits this handler and has nothing to save.
        if os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if not self._finishes:
            self.code = EX_TEMPFAIL
            raise Stopped(EX_TEMPFAIL)
        self._ask(EX_TEMPFAIL, f"{signal.Signals(number).name}: stopping after this step, with a checkpoint.")

    def on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._finishes or self.code == INTERRUPTED:
            raise KeyboardInterrupt
        self._ask(INTERRUPTED, "Stopping after this step, with a checkpoint; Ctrl-C again stops at once.")

    def _ask(self, code: int, line: str) -> None:
        if not self.code and int(os.environ.get("RANK", 0)) == 0:
            # Not with print: the signal may have interrupted a print, and Python's buffer rejects a second one.
            os.write(2, f"\n{line}\n".encode())
        self.code = max(self.code, code)


running: Stop | None = None  # that of the block in `stopping`, for code that waits within a step


@contextmanager
def stopping() -> Iterator[Stop]:
    """Handle signals in the block as requests to stop.

    >>> with stopping() as stop:
    ...     stop.begin()
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.code
    75
    >>> with stopping() as stop:
    ...     stop.begin()
    ...     stop.end()  # nothing is left to finish
    ...     signal.raise_signal(signal.SIGUSR1)
    Traceback (most recent call last):
    ...
    grpo_math.system.signals.Stopped: 75
    """
    global running
    running = stop = Stop()
    try:
        with handling(STOPPING, stop.on_stop), handling([signal.SIGINT], stop.on_interrupt):
            yield stop
    finally:
        running = None
