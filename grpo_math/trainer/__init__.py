"""Rewards -> advantages -> loss -> gradient: `MathGRPOTrainer` and its collaborators, loaded on first use.

docs/internals.md ("One training step") has the data flow.
"""

from importlib import import_module
from typing import Any

_HOME = {"MathGRPOConfig": "config", "MathGRPOTrainer": "trainer"}
__all__ = ["MathGRPOConfig", "MathGRPOTrainer"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grpo_math.trainer import contract

    # Before TRL is imported, because a name that has moved would be a traceback.
    contract.refuse()
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
