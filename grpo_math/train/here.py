"""Training in this process, without a launcher.

Does not import torch before the recipe is checked: a bad recipe is refused within a second.
"""

import os

from grpo_math.checks.preflight import refuse_early
from grpo_math.run.machine import SLEEPING_THREADS
from grpo_math.run.signals import STOPPING, end_at_once, handling
from grpo_math.settings import recipe


def train(argv: list[str], read: recipe.Recipe | None = None) -> int:
    """Train a recipe and return the exit code. ``read`` is the recipe, if it has been read already."""
    with handling(STOPPING, end_at_once):
        read = read or recipe.read(argv)
        refuse_early(read)
        if read.values["use_cpu"]:
            os.environ.setdefault(*SLEEPING_THREADS)
        from grpo_math.train.program import main

        return main(argv, read)
