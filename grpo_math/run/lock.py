"""A lock, so that only one run uses a run directory. The lock names its process and ends with the process, or when
`trainer.train()` of a script ends.

The lock is the kernel's (flock on RUN/.lock), so a run that was killed leaves no lock. The file itself remains.
It is ours because filelock does not say who has a lock, and keeps it in a forked child that outlives the run.

Does not lock readers: an evaluation or a report may run at the same time.
"""

import fcntl
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

from grpo_math.errors import ConfigError
from grpo_math.run.files import writing

NAME = ".lock"
_locks: dict[Path, IO[str]] = {}


def acquire(run_dir: Path) -> None:
    """Lock the folder for this process. Raises `ConfigError` if another process has it.

    Warn about a file system without locks.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> acquire(folder), acquire(folder), owner(folder)  # the lock is this process's own
    (None, None, None)
    """
    folder = run_dir.absolute()
    # flock belongs to an open file. A second open file of this process would find the folder locked.
    if folder in _locks:
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    # Not mode w, which would erase the owner's name before this process has the lock.
    file = open(run_dir / NAME, "a+", encoding="utf-8")  # noqa: SIM115 - open until `release`
    try:
        while not _locked(file, fcntl.LOCK_EX):
            # A report that calls `owner` holds the lock for a moment, and is not a run.
            refuse_used(run_dir)
    except OSError as error:
        warning = f"{run_dir} cannot be locked ({error.strerror}): check that no other run writes to it"
        print(f"warning: {warning}", file=sys.stderr)
    with writing(run_dir / NAME):
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    _locks[folder] = file


def release(run_dir: Path) -> None:
    """Unlock the folder, if this process has the lock."""
    if file := _locks.pop(run_dir.absolute(), None):
        file.close()


def _close_in_child() -> None:
    """Close the locks in a forked child, which may outlive the run: they belong to the parent."""
    for file in _locks.values():
        file.close()
    _locks.clear()


os.register_at_fork(after_in_child=_close_in_child)


def refuse_used(run_dir: Path) -> None:
    """Raise `ConfigError` if the run of another process is under way there."""
    if other := owner(run_dir):
        remedy = "wait until it has ended, or name another folder"
        raise ConfigError("output_dir", str(run_dir), f"is in use: {other} trains there", remedy)


def owner(run_dir: Path) -> str | None:
    """Return the process whose run is under way there; None if no run is, or if the run is this process's."""
    if run_dir.absolute() not in _locks:
        with suppress(OSError), open(run_dir / NAME, encoding="utf-8") as file:
            # A shared lock, so that two readers at the same time do not take each other for the run.
            if not _locked(file, fcntl.LOCK_SH):
                return file.read().strip() or "another process"
    return None


def _locked(file: IO[str], kind: int) -> bool:
    """Lock the file, or return False if another process has it. Raises `OSError` if the file system has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
