"""A write that failed, as one line: what could not be written where, how much is free, and what the run goes on from.

Python, torch and safetensors each say it in their own way; this knows them.

Does not clean up what was half written, and tries nothing again.
"""

import errno
import os
import re
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_math.errors import WriteError
from grpo_math.run.checkpoints import goes_on
from grpo_math.run.machine import GB

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
SAVING = {"_save_checkpoint": "a checkpoint", "save_model": "the trained weights"}  # by the function that writes them
OF_TORCH = re.compile(r"PytorchStreamWriter|unexpected pos|iostream error|Parent directory \S+ does not exist")
OF_SAFETENSORS = re.compile(r"Error while serializing: .*\(os error (\d+)\)")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An `OSError` in here names the file: Python knows it when a file is opened, and not when it is written.

    >>> with naming(Path("runs/x/history.jsonl")):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
    ...
    OSError: [Errno 28] No space left on device: 'runs/x/history.jsonl'
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def failed_write(error: BaseException, run_dir: Path) -> WriteError | None:
    """The line for a run that ends with ``error``; None where it is no failed write.

    A full disk or a read-only file system is one wherever it is met; any other `OSError` where it names a file of the
    run.

    >>> str(failed_write(OSError(errno.ENOSPC, "No space left", "/no/run/history.jsonl"), Path("/no/run")))
    '/no/run/history.jsonl could not be written: No space left on device (... GB free there); the same...'
    >>> failed_write(FileNotFoundError(errno.ENOENT, "No such file", "my.json"), Path("runs/x"))
    """
    number = _number(error, run_dir)
    if number is None:
        return None if error.__cause__ is None else failed_write(error.__cause__, run_dir)
    named = getattr(error, "filename", None)
    if not named:
        within = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        named = f"{next((what for name, what in SAVING.items() if name in within), 'a file')} in {run_dir}"
    failed = "could not be written" if number in {0, errno.EROFS, *NO_ROOM} else "cannot be read or written"
    why = os.strerror(number) if number else "the write failed"
    folder = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(folder).free / GB
    once = "there is room" if number in {0, *NO_ROOM} else "that is fixed"
    return WriteError(f"{named} {failed}: {why} ({free:.1f} GB free there); {goes_on(run_dir)} once {once}")


def _number(error: BaseException, run_dir: Path) -> int | None:
    """The errno of a failed write, 0 where it is one without a number, None where it is none."""
    if isinstance(error, OSError) and error.errno is not None:
        named = error.filename if isinstance(error.filename, str | os.PathLike) else "/"
        ours = Path(os.path.abspath(named)).is_relative_to(run_dir.absolute())
        return error.errno if ours or error.errno in {errno.EROFS, *NO_ROOM} else None
    if found := OF_SAFETENSORS.search(str(error)):
        return int(found[1])
    return 0 if isinstance(error, RuntimeError) and OF_TORCH.search(str(error)) else None
