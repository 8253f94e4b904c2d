"""Doctor before a run, diagnosis in it and after it: what is wrong and what to do about it, as findings."""

from grpo_math.checks.finding import LEVELS, Finding

__all__ = ["LEVELS", "Finding"]
