"""A .jsonl that grows while something is measured, so that an interrupted measurement continues.

The first line states how it is measured; every other line is one result. A last line that was cut off is dropped and
written again. A file that was measured in another way is refused, so that figures are never mixed.

Does not lock: one process writes. Does not know what a line means.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError, first_line
from grpo_math.run.files import replace_text

Line = dict[str, Any]


def read(path: str | Path, about: Mapping[str, Any], field: str) -> list[Line]:
    """Return the whole lines after the first; none if there is no file.

    Raises `ConfigError` for the setting ``field`` if the file is something else, or was measured in another way than
    ``about``.
    """
    path = Path(path)
    if not path.exists():
        return []
    try:
        whole = path.read_bytes().split(b"\n")[:-1]  # bytes: a write may have ended within a letter
        first, *lines = [json.loads(line) for line in whole]
        measured = dict(first["measured"])
    except Exception as error:
        reason = f"cannot be read as measured results ({type(error).__name__}: {first_line(error)})"
        raise ConfigError(field, str(path), reason, "name another file") from None
    for name in about:
        if measured.get(name) != about[name]:
            was = f"was measured with {name}={measured.get(name)!r}, not {about[name]!r}"
            raise ConfigError(field, str(path), was, "name another file, or change the setting back")
    return lines


def resume(path: str | Path, about: Mapping[str, Any], field: str) -> list[Line]:
    """Return what `read` returns, and leave a file that has its first line and ends with a whole line."""
    path = Path(path)
    lines = read(path, about, field)
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps({"measured": dict(about)}, ensure_ascii=False) + "\n")
    return lines


def append(path: str | Path, lines: Iterable[Line]) -> None:
    """Add the lines in one write: of what a killed process wrote, only the last line can be cut."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)
