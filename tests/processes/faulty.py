"""Rewards for runs of the real training program in which something goes wrong, on one rank or in the run's folder."""

import os
import signal
import time
from pathlib import Path

from rewards import letters

RANK = int(os.environ.get("RANK", 0))


def raises_on_one_rank(completions, trainer_state, **columns):
    if RANK == 1 and trainer_state.global_step == 1:
        raise OSError("the judge is away")
    return letters(completions)


def exits_on_one_rank(completions, trainer_state, **columns):
    if RANK == 1 and trainer_state.global_step == 1:
        os._exit(0)
    return letters(completions)


def killed_on_one_rank(completions, trainer_state, **columns):
    if RANK == 1 and trainer_state.global_step == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return letters(completions)


def hangs_on_one_rank(completions, trainer_state, **columns):
    """Until there is a file that the test makes."""
    while RANK == 1 and trainer_state.global_step == 1 and not Path(os.environ["GO"]).exists():
        time.sleep(0.05)
    return letters(completions)
