"""Failed writes as one line: the file, the free space, and how to resume.

Python, torch and safetensors report a failed write in different ways; `failed_write` knows all three.

Does not delete unfinished files, and does not retry.
"""

import errno
import os
import re
import shutil
from pathlib import Path

from grpo_math.errors import WriteError, first_line
from grpo_math.run.checkpoints import how_to_resume
from grpo_math.run.files import existing
from grpo_math.run.machine import GB

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# torch raises RuntimeError, and safetensors an exception of its own.
OF_A_WRITER = re.compile(r"PytorchStreamWriter|unexpected pos|iostream error|Error while serializing: .*os error")


def failed_write(error: BaseException | None, run_dir: Path) -> WriteError | None:
    """Return the error for a run that ends with ``error``; None if that is not a failed write.

    A full disk and a read-only file system always count. Any other `OSError` counts if it names a file of the run.

    >>> str(failed_write(OSError(errno.ENOSPC, "No space left"), Path("/no/run")))
    'a file in /no/run could not be written ([Errno 28] No space left; ... GB free); the same command starts over'
    >>> failed_write(FileNotFoundError(errno.ENOENT, "No such file", "my.json"), Path("runs/x"))
    """
    while error is not None:
        if _is_failed_write(error, run_dir):
            free = shutil.disk_usage(existing(run_dir)).free / GB
            reason = f"a file in {run_dir} could not be written ({first_line(error)}; {free:.1f} GB free)"
            return WriteError(f"{reason}; {how_to_resume(run_dir)}")
        error = error.__cause__
    return None


def _is_failed_write(error: BaseException, run_dir: Path) -> bool:
    if not isinstance(error, OSError):
        return OF_A_WRITER.search(str(error)) is not None
    ours = error.filename and Path(os.path.abspath(error.filename)).is_relative_to(run_dir.absolute())
    return bool(ours) or error.errno in NO_ROOM
