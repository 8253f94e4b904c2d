"""The training program in this process, on a model that is small enough for the quick tests, and a disk that fills."""

from small_model import small
from small_runs import size_limit
from small_trainers import train

__all__ = ["size_limit", "small", "train"]
