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

from grpo_math.errors import ConfigError
from grpo_math.reading import reading
from grpo_math.run.files import replace_text

Line = dict[str, Any]


def resume(path: Path, conditions: Mapping[str, Any], field: str) -> list[Line]:
    """Return the complete lines after the first, and remove an incomplete last line. A new file gets its first line.

    Raises `Unreadable` if the file is not a journal, and `ConfigError` for the setting ``field`` if it has other
    ``conditions``.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps({"measured": dict(conditions)}, ensure_ascii=False) + "\n")
        return []
    # Bytes, because a write may have ended within a character.
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    with reading(path):
        first, *lines = [json.loads(line) for line in whole.splitlines()]
        measured = {**first["measured"]}
    # Only the conditions of this version are compared: an older file may state more.
    for name in conditions:
        if measured.get(name) != conditions[name]:
            was = f"was measured with {name}={measured.get(name)!r}, not {conditions[name]!r}"
            raise ConfigError(field, str(path), was, "name another file, or change the setting back")
    # Only here: a file that is refused above stays as it was.
    os.truncate(path, len(whole))
    return lines


def append(path: Path, lines: Iterable[Line]) -> None:
    """Add the lines in one write, so that a killed process can cut only the last line."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)
