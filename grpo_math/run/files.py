"""Atomic writes: a file is written next to the old one and renamed.

failures.py reports a write that fails during a run.
"""

import json
import os
from pathlib import Path
from typing import Any


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def write_json(path: Path, content: Any) -> None:
    """Write JSON as `replace_text` does, and create the folder."""
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
