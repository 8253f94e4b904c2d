"""A .jsonl file that grows during a measurement, so that an interrupted measurement continues.

The first line states the conditions of the measurement; each other line is one result. A last line that was cut off is
dropped and written again. A file with other conditions is refused, so that results are never mixed.

Does not lock the file: only one process writes. Does not interpret a line.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError, first_line
from grpo_math.run.files import replace_text

Line = dict[str, Any]


def read(path: str | Path, conditions: Mapping[str, Any], field: str) -> list[Line]:
    """Return the complete lines after the first; [] if the file does not exist.

    Raises `ConfigError` for the setting ``field`` if the file is not a journal, or has other ``conditions``.
    """
    path = Path(path)
    if not path.exists():
        return []
    try:
        whole = path.read_bytes().split(b"\n")[:-1]  # bytes, because a write may have ended within a character
        first, *lines = [json.loads(line) for line in whole]
        measured = dict(first["measured"])
    except Exception as error:
        reason = f"cannot be read as measured results ({type(error).__name__}: {first_line(error)})"
        raise ConfigError(field, str(path), reason, "name another file") from None
    for name in conditions:
        if measured.get(name) != conditions[name]:
            was = f"was measured with {name}={measured.get(name)!r}, not {conditions[name]!r}"
            raise ConfigError(field, str(path), was, "name another file, or change the setting back")
    return lines


def resume(path: str | Path, conditions: Mapping[str, Any], field: str) -> list[Line]:
    """Return the lines as `read` does. Write the first line of a new file, and remove an incomplete last line."""
    path = Path(path)
    lines = read(path, conditions, field)
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps({"measured": dict(conditions)}, ensure_ascii=False) + "\n")
    return lines


def append(path: str | Path, lines: Iterable[Line]) -> None:
    """Add the lines in one write, so that a killed process can cut only the last line."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)
