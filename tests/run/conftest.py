"""A disk that fills."""

from small_runs import size_limit

__all__ = ["size_limit"]
