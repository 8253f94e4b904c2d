"""GRPO for mathematics, as a plugin on TRL's `GRPOTrainer`.

The public names below are loaded on first use: importing grpo_math imports neither torch nor trl.

>>> from grpo_math import grade
>>> str(grade("72", "48 / 2 = 24, and 48 + 24 = 72. #### 72"))
'correct'
"""

from importlib import import_module
from typing import Any

# The version is defined only here. pyproject.toml reads it, and CHANGELOG.md begins with the same version.
__version__ = "0.5.0"

_HOME = {
    "MathGRPOConfig": "trainer",
    "MathGRPOTrainer": "trainer",
    "grade": "grading",
    "Verdict": "grading",
    "REWARDS": "rewards",
    "load_problems": "problems.datasets",
    "evaluate": "evaluation.for_scripts",
}
__all__ = ["REWARDS", "MathGRPOConfig", "MathGRPOTrainer", "Verdict", "evaluate", "grade", "load_problems"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'grpo_math' has no attribute {name!r}")
    value = getattr(import_module(f"grpo_math.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
