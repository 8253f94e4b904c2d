"""Training in this process, without a launcher.

Does not import torch before the recipe is checked: a bad recipe is refused within a second.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

from grpo_math.checks.preflight import refuse_early
from grpo_math.run.machine import SLEEPING_THREADS
from grpo_math.run.signals import STOPPING, end_at_once, handling
from grpo_math.settings import recipe

UNFINISHED = "error: training ended with exit code 0 before it was finished: look for os._exit in what it calls"


def train(argv: list[str], read: recipe.Recipe | None = None) -> int:
    """Train a recipe and return the exit code. ``read`` is the recipe, if it has been read already."""
    with handling(STOPPING, end_at_once), _no_silent_exit():
        read = read or recipe.read(argv)
        refuse_early(read)
        if read.values["use_cpu"]:
            os.environ.setdefault(*SLEEPING_THREADS)
        from grpo_math.train.program import main

        return main(argv, read)


@contextlib.contextmanager
def _no_silent_exit() -> Iterator[None]:
    """End with exit code 1 and a line if something in this process, such as a reward, calls ``os._exit(0)``.

    A script or a SLURM job would take exit code 0 for a finished run.
    """
    leave, pid = os._exit, os.getpid()

    def leave_aloud(status: int) -> NoReturn:
        if status == 0 and os.getpid() == pid:  # a forked process may end like this
            print(UNFINISHED, file=sys.stderr, flush=True)
            status = 1
        leave(status)

    os._exit = leave_aloud
    try:
        yield
    finally:
        os._exit = leave
