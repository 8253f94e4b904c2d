"""A .jsonl that grows while something is measured: what was interrupted goes on where it was cut.

The first line says how it is measured; every other line is one thing that was. A last line that was cut off is left
out, and written again. A file that was measured in another way is refused, so that figures are never mixed.

Does not lock: one process writes. Does not know what a line means.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.grading.version import KEY, as_now
from grpo_math.reading import from_json, read_bytes

Line = dict[str, Any]


def read(path: str | Path, about: Mapping[str, Any], field: str) -> list[Line]:
    """The whole lines after the first; none where there is no file, or one that was cut within its first line.

    `ConfigError` of the setting ``field`` if the file is something else, or was measured in another way than ``about``.
    """
    path = Path(path)
    if not path.exists():
        return []
    try:
        *whole, rest = read_bytes(path).split(b"\n")  # bytes: the last letter may be half there
        lines = [from_json(line) for line in whole] or [json.loads(_first_line(about))]
        if not whole and not _first_line(about).encode().startswith(rest):
            raise ValueError("not the beginning of a first line")
        measured = as_now(dict(lines[0]["measured"]))
        if not all(isinstance(line, dict) for line in lines):
            raise ValueError("a line is not an object")
    except (OSError, ValueError, KeyError, TypeError):
        raise not_one(path, field) from None
    for name in about:
        if measured.get(name) != about[name]:
            was = f"was measured with {name}={measured.get(name)!r}, not {about[name]!r}"
            remedy = "install the grpo_math and math-verify that measured it" if name == KEY else "set it back"
            raise ConfigError(field, str(path), was, f"name another file, or {remedy}")
    return lines[1:]


def go_on(path: str | Path, about: Mapping[str, Any], field: str) -> list[Line]:
    """`read`; afterwards the file is there, has its first line, and ends with a whole line."""
    path = Path(path)
    lines = read(path, about, field)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = path.read_bytes() if path.exists() else b""
    if b"\n" in content:
        os.truncate(path, content.rfind(b"\n") + 1)
    else:
        path.write_text(_first_line(about), encoding="utf-8")
    return lines


def about(path: str | Path) -> dict[str, Any]:
    """How a file was measured; nothing where its first line does not say so."""
    try:
        with open(path, encoding="utf-8") as file:
            return as_now(dict(json.loads(file.readline())["measured"]))
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def append(path: str | Path, lines: Iterable[Line]) -> None:
    """Add the lines in one write: of what a killed process wrote, only the last line can be cut."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def not_one(path: str | Path, field: str) -> ConfigError:
    """The error of a file that holds something else."""
    return ConfigError(field, str(path), "holds something else, or is damaged", "name another file")


def _first_line(about: Mapping[str, Any]) -> str:
    return json.dumps({"measured": dict(about)}, ensure_ascii=False) + "\n"
