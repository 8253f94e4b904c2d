"""Failed writes as one line: the file, the free space, and how to resume.

Python, torch and safetensors report a failed write in different ways; `failed_write` knows all three.

Does not delete unfinished files, and does not retry.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_math.errors import WriteError
from grpo_math.run.checkpoints import goes_on
from grpo_math.run.machine import GB

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
OF_TORCH = re.compile(r"PytorchStreamWriter|unexpected pos|iostream error|Parent directory \S+ does not exist")
OF_SAFETENSORS = re.compile(r"Error while serializing: .*\(os error (\d+)\)")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an `OSError`: Python adds it when a file is opened, but not when it is written.

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
    """Return the error for a run that ends with ``error``; None if that is not a failed write.

    A full disk and a read-only file system always count. Any other `OSError` counts if it names a file of the run.

    >>> str(failed_write(OSError(errno.ENOSPC, "No space left", "/no/run/history.jsonl"), Path("/no/run")))
    '/no/run/history.jsonl could not be written: No space left on device (... GB free there); the same...'
    >>> failed_write(FileNotFoundError(errno.ENOENT, "No such file", "my.json"), Path("runs/x"))
    """
    number = _number(error, run_dir)
    if number is None:
        return None if error.__cause__ is None else failed_write(error.__cause__, run_dir)
    named = getattr(error, "filename", None)
    if not named:
        named = f"a file in {run_dir}"
    failed = "could not be written" if number in {0, errno.EROFS, *NO_ROOM} else "cannot be read or written"
    reason = os.strerror(number) if number else "the write failed"
    folder = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(folder).free / GB
    once = "there is room" if number in {0, *NO_ROOM} else "that is fixed"
    return WriteError(f"{named} {failed}: {reason} ({free:.1f} GB free there); {goes_on(run_dir)} once {once}")


def _number(error: BaseException, run_dir: Path) -> int | None:
    """Return the errno of a failed write, 0 if it has no number, None if the error is not a failed write."""
    if isinstance(error, OSError) and error.errno is not None:
        named = error.filename if isinstance(error.filename, str | os.PathLike) else "/"
        ours = Path(os.path.abspath(named)).is_relative_to(run_dir.absolute())
        return error.errno if ours or error.errno in {errno.EROFS, *NO_ROOM} else None
    if match := OF_SAFETENSORS.search(str(error)):
        return int(match[1])
    return 0 if isinstance(error, RuntimeError) and OF_TORCH.search(str(error)) else None
