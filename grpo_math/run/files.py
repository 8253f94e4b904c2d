"""Atomic writes: a file is written next to the old one and renamed. Folders that cannot be written are refused.

Does not report a write that fails during a run (failures.py does).
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


def refuse_unwritable(field: str, value: object, folder: Path, remedy: str) -> None:
    """Raise `ConfigError` unless the folder, or its nearest parent that exists, can be written to.

    >>> refuse_unwritable("output_dir", "runs", Path("runs"), "name another")
    >>> refuse_unwritable("output_dir", "x", Path(json.__file__) / "x", "name another")
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: output_dir='x' cannot be written: ... is read-only, or not a folder: name another
    """
    parent = existing(folder)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
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


def flush(path: Path) -> None:
    # fsync needs no write access, and a folder cannot be opened for writing.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
