"""A YAML file -> its value, and back. A name that is given twice is an error: YAML would ignore the first value."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from grpo_math.system.reading import reading

# libyaml is ten times as fast as PyYAML's own code. PyYAML's wheels contain it.
Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Strict(Loader):
    """YAML without repeated names."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.YAMLError(f"{key.value} is given twice, in line {key.start_mark.line + 1}")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> Any:
    """Return the value of a YAML file. Raises `Unreadable`."""
    # Read a stream, not a text: an error in a text quotes the line, which may contain a token.
    with reading(path), open(path, "rb") as file:
        return yaml.load(file, _Strict)


def from_yaml(text: str) -> Any:
    """Return the value of a YAML text of the command line. Raises `Unreadable`.

    >>> from_yaml("[{data: math500}]")
    [{'data': 'math500'}]
    """
    with reading("the text"):
        return yaml.load(text, _Strict)


def as_yaml(value: Any) -> str:
    """Return the text of a YAML file, with sorted names. Raises for a type that is not one of YAML's own.

    >>> print(as_yaml({"seed": 1, "rewards": ["correct"]}), end="")
    rewards:
    - correct
    seed: 1
    """
    return yaml.dump(value, Dumper=Dumper, sort_keys=True, allow_unicode=True)
