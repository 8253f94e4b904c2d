"""Failures of the machine as one line: a write that failed, or another rank that does not answer; and how to resume.

Over gloo a collective raises at once if a rank was killed. Over NCCL it waits in C++, where no signal handler of Python
runs, until the launcher ends the rank (train/ranks.py). If a machine vanishes, both wait for ``ddp_timeout``.

An unfinished file stays.
"""

import os
import shutil
from datetime import timedelta
from pathlib import Path

from accelerate import PartialState
from torch.distributed import DistError, distributed_c10d

from grpo_math.errors import UserError, WriteError, first_line
from grpo_math.run.checkpoints import how_to_resume, unfinished_names
from grpo_math.run.files import chain, existing, no_room
from grpo_math.system.machine import GB


class LostRank(UserError):
    """A collective that another rank did not answer."""


def limit_waiting(ddp_timeout: float) -> None:
    """Apply ``ddp_timeout`` to gloo, and to DeepSpeed's groups: transformers passes it on only to the first group, and
    only for GPUs."""
    state, limit = PartialState(), timedelta(seconds=ddp_timeout)
    # DeepSpeed names no timeout for its groups. torch's default over NCCL is 10 minutes.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = limit
    if state.num_processes > 1 and state.backend == "gloo":
        # Changed afterwards: transformers' arguments have made the process group, on a CPU without their timeout.
        distributed_c10d._set_pg_timeout(limit)


def failure(error: BaseException, run_dir: Path, command: str = "the same command") -> UserError | None:
    """Return the error to report for a run that ends with ``error``; None if the machine is not the reason.

    A full disk and a read-only file system always count as a failed write. Any other `OSError` counts if it names a
    file of the run. ``command``: what continues the run.

    >>> str(failure(Exception("No space left on device (os error 28)"), Path("/no/run")))
    'a file in /no/run could not be written (No space left on device (os error 28); ... GB free); the same command ...'
    >>> failure(FileNotFoundError(2, "No such file", "my.json"), Path("runs/x"))
    """
    if written := no_room(error) or next((one for one in chain(error) if _names_run_file(one, run_dir)), None):
        free = shutil.disk_usage(existing(run_dir)).free / GB
        # An error of torch does not name its file, so name the folder that is being written.
        name = next(iter(unfinished_names(run_dir)), "a file")
        reason = f"{name} in {run_dir} could not be written ({first_line(written)}; {free:.1f} GB free)"
        return WriteError(f"{reason}; {how_to_resume(run_dir, command)}")
    for one in chain(error):
        # torch has a class for NCCL's errors. gloo raises a plain RuntimeError.
        if isinstance(one, DistError) or (isinstance(one, RuntimeError) and "gloo" in str(one)):
            reason = f"another rank does not answer ({first_line(one)}): see its machine"
            return LostRank(f"{reason}; {how_to_resume(run_dir, command)}")
    return None


def _names_run_file(error: BaseException, run_dir: Path) -> bool:
    if not isinstance(error, OSError) or not error.filename:
        return False
    return Path(os.path.abspath(os.fsdecode(error.filename))).is_relative_to(run_dir.absolute())
