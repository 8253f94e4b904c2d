"""Atomic writes: a file is written next to the old one and renamed. Folders that cannot be written are refused.

Does not report a write that fails during a run (disk.py does).
"""

import json
import os
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def read_only(folder: Path) -> bool:
    """Return True if no file can be created in this folder."""
    return not os.access(folder, os.W_OK | os.X_OK)


def refuse_unwritable(field: str, value: object, folder: Path, remedy: str) -> None:
    """Raise `ConfigError` unless the folder, or its nearest parent that exists, can be written to."""
    parent = existing(folder)
    if not parent.is_dir() or read_only(parent):
        raise ConfigError(field, value, f"cannot be written: {parent} is read-only, or not a folder", remedy)


def write_json(path: str | Path, content: Any) -> None:
    """Write JSON as `replace_text` does, and create the folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write next to the file and rename: a kill at any moment leaves the old file or the new one."""
    scratch = path.with_name(f".{path.name}.part")
    scratch.write_text(text, encoding="utf-8")
    # Without this a power failure after the rename may leave an empty file under the final name.
    flush(scratch)
    scratch.replace(path)


def keep_lines(path: Path, keep: Any) -> None:
    """Drop the lines of a JSONL file for which ``keep`` returns False, and a last line that was cut off.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "history.jsonl")
    >>> _ = path.write_text('{"step": 1}\\n{"step": 2}\\n{"st')
    >>> keep_lines(path, lambda line: line["step"] < 2)
    >>> path.read_text()
    '{"step": 1}\\n'
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if keep(json.loads(line)):
                kept.append(line + "\n")
        except ValueError:
            continue
    replace_text(path, "".join(kept))


def flush(path: Path) -> None:
    # fsync needs no write access, and a folder cannot be opened for writing.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
