"""Limits of the Python tool: the mapping ``python:`` of a recipe.

sandbox.py, server.py and python.py enforce them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_math.errors import ConfigError, require_choice


@dataclass(frozen=True)
class PythonLimits:
    """Limits of one call."""

    cpu_seconds: int = 5
    wall_seconds: float = 10.0
    memory_mb: int = 512  # in addition to the interpreter itself
    # A program that prints more is killed, and its output is truncated.
    output_chars: int = 2000


MOST = {"cpu_seconds": 3600, "wall_seconds": 3600, "memory_mb": 1_000_000, "output_chars": 1_000_000}


def read_limits(mapping: Mapping[str, Any]) -> PythonLimits:
    """Check the names, types and ranges of a recipe's mapping. Raises `ConfigError`.

    >>> read_limits({"cpu_seconds": 2}).cpu_seconds
    2
    >>> read_limits({"cpu_second": 2})
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: python='cpu_second' is not known: did you mean 'cpu_seconds'? ...
    >>> read_limits({"memory_mb": 0})
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: python.memory_mb=0 is out of range: give a whole number from 1 to 1000000
    """
    for name, value in mapping.items():
        require_choice("python", name, tuple(MOST))
        kind, types = ("a number", (int, float)) if name == "wall_seconds" else ("a whole number", (int,))
        remedy = f"give {kind} from 1 to {MOST[name]}"
        # Not `isinstance`, because True is an int.
        if type(value) not in types:
            raise ConfigError(f"python.{name}", value, f"is not {kind}", remedy)
        if not 1 <= value <= MOST[name]:
            raise ConfigError(f"python.{name}", value, "is out of range", remedy)
    return PythonLimits(**mapping)
