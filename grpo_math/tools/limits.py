"""What a Python program of the model's may use: the mapping ``python:`` of a recipe.

Does not hold a program to it: confine.py and python.py do.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from grpo_math.errors import ConfigError, one_of

WALLS = ("all", "any")


@dataclass(frozen=True)
class PythonLimits:
    """Limits of one call, or with ``session`` of one completion's calls together where it says so."""

    cpu_seconds: int = 5  # of each process; in a session those of all its calls
    wall_seconds: float = 10.0  # of each call
    memory_mb: int = 512  # of each process, beyond what the interpreter itself holds
    processes: int = 1  # processes and threads at once, the program itself among them
    output_chars: int = 2000  # what a call prints beyond that is cut, and the program ended
    session: bool = False  # names stay from call to call of a completion
    walls: str = "all"  # any: run with those walls that this machine has


MOST = {"cpu_seconds": 3600, "wall_seconds": 3600, "memory_mb": 1_000_000, "processes": 64, "output_chars": 1_000_000}


def read_limits(given: Mapping[str, Any]) -> PythonLimits:
    """The mapping of a recipe, each name, kind and range checked. Raises `ConfigError`.

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
    known = {field.name: field.default for field in fields(PythonLimits)}
    for name in given:
        one_of("python", name, tuple(known))
    return PythonLimits(**{name: _checked(name, value, known[name]) for name, value in given.items()})


def _checked(name: str, value: Any, default: Any) -> Any:
    field = f"python.{name}"
    if name == "walls":
        one_of(field, value, WALLS)
        return value
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigError(field, value, "is neither true nor false", "use one of the two")
        return value
    whole, most = not isinstance(default, float), MOST[name]
    kind, least = ("whole number", 1) if whole else ("number", 0.1)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ConfigError(field, value, f"is not a {kind}", f"the default is {default}")
    if not least <= value <= most:
        raise ConfigError(field, value, "is out of range", f"give a {kind} from {least} to {most}")
    return type(default)(value)


def as_mapping(limits: PythonLimits) -> dict[str, Any]:
    """What a results file says of the tool.

    >>> as_mapping(PythonLimits())["cpu_seconds"]
    5
    """
    return asdict(limits)
