"""Collectives that another rank does not answer, because the rank, its machine or the network is gone.

Over gloo a collective raises at once if a rank was killed. Over NCCL it waits in C++, where no signal handler of Python
runs, until the launcher ends the rank (train/ranks.py). If a machine vanishes, both wait for ``ddp_timeout``.
"""

from datetime import timedelta
from pathlib import Path

from accelerate import PartialState
from torch.distributed import DistError, distributed_c10d

from grpo_math.errors import UserError
from grpo_math.run.checkpoints import how_to_resume
from grpo_math.run.redact import one_line


def limit_waiting(ddp_timeout: float) -> None:
    """Apply ``ddp_timeout`` to gloo too: transformers passes it on for GPUs alone."""
    state = PartialState()
    if state.num_processes > 1 and state.backend == "gloo":
        # Changed afterwards: transformers' arguments have made the process group, on a CPU without their timeout.
        distributed_c10d._set_pg_timeout(timedelta(seconds=ddp_timeout))


class LostRank(UserError):
    """A collective that another rank did not answer."""


def unanswered(error: BaseException | None, run_dir: Path) -> LostRank | None:
    """Return the error for a run that ends with ``error``; None if that is not a collective without an answer."""
    while error is not None:
        # torch has a class for NCCL's errors. gloo raises a plain RuntimeError.
        if isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            reason = f"another rank does not answer ({one_line(error)}): see its machine"
            return LostRank(f"{reason}; {how_to_resume(run_dir)}")
        error = error.__cause__ or error.__context__
    return None
