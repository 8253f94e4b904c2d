"""Limits of the Python tool: the mapping ``python:`` of a recipe.

Does not enforce them: sandbox.py, server.py and python.py do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from grpo_math.errors import ConfigError, one_of

WALLS = ("all", "any")


@dataclass(frozen=True)
class PythonLimits:
    """Limits of one call. A comment names the limits that apply to all calls of a completion together."""

    cpu_seconds: int = 5  # of the program; in a session of all its calls together
    wall_seconds: float = 10.0  # of each call
    memory_mb: int = 512  # in addition to the interpreter itself
    output_chars: int = 2000  # a program that prints more is killed, and its output is truncated
    session: bool = False  # names stay from call to call of a completion
    walls: str = "all"  # any: run with the layers of the sandbox that this machine supports


MOST = {"cpu_seconds": 3600, "wall_seconds": 3600, "memory_mb": 1_000_000, "output_chars": 1_000_000}
# Type of the default -> accepted types, their name in a message, the smallest number.
KINDS: dict[type, tuple[Any, str, float]] = {
    bool: (bool, "true or false", 0),
    int: (int, "a whole number", 1),
    float: (int | float, "a number", 0.1),
}


def read_limits(given: Mapping[str, Any]) -> PythonLimits:
    """Check the names, types and ranges of a recipe's mapping. Raises `ConfigError`.

    >>> read_limits({"cpu_seconds": 2, "session": True}).cpu_seconds
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
    if not isinstance(given, Mapping):
        raise ConfigError("python", given, "is not a mapping", "write the limits as python: {cpu_seconds: 5, ...}")
    defaults = {field.name: field.default for field in fields(PythonLimits)}
    for name, value in given.items():
        one_of("python", name, tuple(defaults))
        field, default = f"python.{name}", defaults[name]
        if name == "walls":
            one_of(field, value, WALLS)
            continue
        types, called, least = KINDS[type(default)]
        if not isinstance(value, types) or isinstance(value, bool) != isinstance(default, bool):
            raise ConfigError(field, value, f"is not {called}", f"the default is {default}")
        if not least <= value <= MOST.get(name, 1):
            raise ConfigError(field, value, "is out of range", f"give {called} from {least} to {MOST[name]}")
    return PythonLimits(**given)
