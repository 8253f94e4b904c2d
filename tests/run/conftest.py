"""A model that is small enough for the quick tests of training."""

from __future__ import annotations

from small_model import small

__all__ = ["small"]
