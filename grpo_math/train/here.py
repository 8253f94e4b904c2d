"""Training in this process, without a launcher.

Does not import torch before the recipe is checked: a bad recipe is refused within a second.
"""

import os

from grpo_math.checks.preflight import refuse_early
from grpo_math.run.machine import SLEEPING_THREADS
from grpo_math.run.signals import STOPPING, end_at_once, handling
from grpo_math.settings.recipe import Recipe


def train(argv: list[str], read: Recipe) -> int:
    """Train a recipe and return the exit code. ``read`` is the recipe that the words of ``argv`` give."""
    with handling(STOPPING, end_at_once):
        refuse_early(read)
        if read.values["use_cpu"]:
            os.environ.setdefault(*SLEEPING_THREADS)
        from grpo_math.train.program import main

        return main(argv, read)
