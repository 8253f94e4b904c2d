"""A model on problems -> results, intervals, comparisons; loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "answered": "results",
    "category": "results",
    "evaluate": "results",
    "summary": "results",
    "text_of": "results",
}
__all__ = ["answered", "category", "evaluate", "summary", "text_of"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
