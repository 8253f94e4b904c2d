"""Failures of the machine as one line: a write that failed, or another rank that does not answer; and how to resume.

Python, torch and safetensors report a failed write in different ways. Over gloo a collective raises at once if a rank
was killed. Over NCCL it waits in C++, where no signal handler of Python runs, until the launcher ends the rank
(train/ranks.py). If a machine vanishes, both wait for ``ddp_timeout``.

An unfinished file is left where it is.
"""

import errno
import os
import re
import shutil
from datetime import timedelta
from pathlib import Path

from accelerate import PartialState
from torch.distributed import DistError, distributed_c10d

from grpo_math.errors import UserError, WriteError, first_line
from grpo_math.run.checkpoints import how_to_resume
from grpo_math.run.files import existing
from grpo_math.run.machine import GB

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
# torch raises RuntimeError, and safetensors raises SafetensorError.
WRITER_ERROR = re.compile(r"PytorchStreamWriter|unexpected pos|iostream error|Error while serializing: .*os error")


class LostRank(UserError):
    """A collective that another rank did not answer."""


def limit_waiting(ddp_timeout: float) -> None:
    """Apply ``ddp_timeout`` to gloo too: transformers passes it on only for GPUs."""
    state = PartialState()
    if state.num_processes > 1 and state.backend == "gloo":
        # Changed afterwards: transformers' arguments have made the process group, on a CPU without their timeout.
        distributed_c10d._set_pg_timeout(timedelta(seconds=ddp_timeout))


def failure(error: BaseException | None, run_dir: Path) -> UserError | None:
    """Return the error to report for a run that ends with ``error``; None if the machine is not the reason.

    A full disk and a read-only file system always count as a failed write. Any other `OSError` counts if it names a
    file of the run.

    >>> str(failure(OSError(errno.ENOSPC, "No space left"), Path("/no/run")))
    'a file in /no/run could not be written ([Errno 28] No space left; ... GB free); the same command starts over'
    >>> failure(FileNotFoundError(errno.ENOENT, "No such file", "my.json"), Path("runs/x"))
    """
    while error is not None:
        if _is_failed_write(error, run_dir):
            free = shutil.disk_usage(existing(run_dir)).free / GB
            reason = f"a file in {run_dir} could not be written ({first_line(error)}; {free:.1f} GB free)"
            return WriteError(f"{reason}; {how_to_resume(run_dir)}")
        # torch has a class for NCCL's errors. gloo raises a plain RuntimeError.
        if isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            reason = f"another rank does not answer ({first_line(error)}): see its machine"
            return LostRank(f"{reason}; {how_to_resume(run_dir)}")
        error = error.__cause__ or error.__context__
    return None


def _is_failed_write(error: BaseException, run_dir: Path) -> bool:
    if not isinstance(error, OSError):
        return WRITER_ERROR.search(str(error)) is not None
    ours = error.filename and Path(os.path.abspath(error.filename)).is_relative_to(run_dir.absolute())
    return bool(ours) or error.errno in NO_ROOM
