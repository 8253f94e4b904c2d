"""A model on problems -> results, intervals, comparisons; loaded on first use."""

from importlib import import_module
from typing import Any

MODULES = {
    "answered": "results",
    "category": "figures",
    "evaluate": "of_trainer",
    "summary": "figures",
    "text_of": "figures",
}
__all__ = ["answered", "category", "evaluate", "summary", "text_of"]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
