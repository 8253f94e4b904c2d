"""Rewards for runs of the real training program in which something goes wrong, on one rank or in the run's folder."""

import os
import time
from pathlib import Path

RANK = int(os.environ.get("RANK", 0))


def letters(completions, **columns):
    """Differs within a group, and needs no answer that is right."""
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]


def letters_slowly(completions, **columns):
    """The same, in a step that leaves time for a fault."""
    time.sleep(0.4)
    return letters(completions)


def raises_on_one_rank(completions, trainer_state, **columns):
    if RANK == 1 and trainer_state.global_step == 1:
        raise OSError("the judge is away")
    return letters(completions)


def hangs_on_one_rank(completions, trainer_state, **columns):
    """Until there is a file that the test makes."""
    while RANK == 1 and trainer_state.global_step == 1 and not Path(os.environ["GO"]).exists():
        time.sleep(0.05)
    return letters(completions)
