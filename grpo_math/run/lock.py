"""One run at a time in a run directory: a lock that ends with the process that holds it, and says whose it is.

The lock is the kernel's (flock on RUN/.lock), so a run that was killed leaves none behind. The file itself stays.

Does not lock what only reads: an evaluation, a report.
"""

import fcntl
import os
import socket
import sys
from pathlib import Path
from typing import IO

from grpo_math.errors import ConfigError

NAME = ".lock"
_held: dict[Path, IO[str]] = {}  # for as long as this process lives


def hold(run_dir: Path, make: bool = True) -> None:
    """Lock the folder for this process. `ConfigError` where another one has it, or where it cannot be written.

    Without ``make``, a folder that no run has locked before is left as it is. A file system without locks is a warning.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> hold(folder), hold(folder), owner(folder)  # the lock is this process's own
    (None, None, None)
    >>> (folder / NAME).read_text()
    'process ... on ...'
    """
    folder = run_dir.absolute()
    if folder in _held or not (make or (run_dir / NAME).exists()):
        return
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = open(run_dir / NAME, "a+", encoding="utf-8")  # noqa: SIM115 - open for the life of this process
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(run_dir, _said(file)) from None
        except OSError as error:
            said = f"{run_dir} cannot be locked ({error.strerror}): see that no other run writes to it"
            print(f"warning: {said}", file=sys.stderr)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise ConfigError("output_dir", str(run_dir), reason, "name another folder") from None
    _held[folder] = file


def _let_go() -> None:
    """In a forked child, which may outlive the run: the lock is the parent's."""
    for file in _held.values():
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def owner(run_dir: Path) -> str | None:
    """Whose run is under way there; None where there is none, or this process's own."""
    if run_dir.absolute() in _held:
        return None
    try:
        with open(run_dir / NAME, encoding="utf-8") as file:
            return None if _is_free(file) else _said(file)
    except OSError:
        return None


def abandoned(folder: Path) -> bool:
    """Whether a process has locked the folder and is gone. False where locks cannot tell.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = abandoned(folder), (folder / NAME).write_text("process 1 on a machine that is off")
    >>> abandoned(folder), hold(folder), abandoned(folder)
    (True, None, False)
    """
    if folder.absolute() in _held:
        return False
    try:
        with open(folder / NAME, encoding="utf-8") as file:
            return _is_free(file)
    except OSError:  # none has locked it
        return False


def release(folder: Path) -> None:
    """Give up this process's lock of the folder."""
    if file := _held.pop(folder.absolute(), None):
        file.close()


def in_use(run_dir: Path, owner: str) -> ConfigError:
    reason = f"is in use: {owner} trains there"
    return ConfigError("output_dir", str(run_dir), reason, "wait until it has ended, or name another folder")


def _is_free(file: IO[str]) -> bool:
    """Whether no process holds this lock. `OSError` where locks cannot tell."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _said(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip() or "another process"
