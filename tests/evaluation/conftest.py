"""A small model, and models that answer as a test says."""

from small_model import script, small

__all__ = ["script", "small"]
