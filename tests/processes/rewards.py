"""Rewards for runs of the real training program."""

import time


def letters(completions, **columns):
    """Differs within a group, and needs no answer that is right."""
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]


def letters_slowly(completions, **columns):
    """The same, in a step that leaves time for a fault."""
    time.sleep(0.4)
    return letters(completions)
