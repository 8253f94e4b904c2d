"""Rewards -> advantages -> loss -> gradient: `MathGRPOTrainer` and its collaborators, loaded on first use.

docs/internals.md ("One training step") has the data flow.
"""

from importlib import import_module
from typing import Any

from grpo_math.system.machine import refuse_trl

_HOME = {"MathGRPOConfig": "config", "MathGRPOTrainer": "trainer"}
__all__ = ["MathGRPOConfig", "MathGRPOTrainer"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Before TRL is imported, because a name that has moved would be a traceback.
    refuse_trl()
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
