"""The training program in this process, on a model that is small enough for the quick tests."""

from small_model import small
from small_trainers import train
from small_vllm import server

__all__ = ["server", "small", "train"]
