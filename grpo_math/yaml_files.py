"""A YAML file -> its value. A name that is given twice is an error, because YAML would ignore the first value.

Does not check what a file should contain.
"""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from grpo_math.reading import reading


class _Strict(yaml.SafeLoader):
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
    # From a stream, not from a text: an error in a text quotes the line, which may contain a token.
    with reading(path), open(path, "rb") as file:
        return yaml.load(file, _Strict)
