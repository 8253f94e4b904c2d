"""A small model, and models that answer as a test says."""

from small_model import script, small
from small_vllm import server

__all__ = ["script", "server", "small"]
