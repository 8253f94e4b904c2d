r"""Files of the user -> JSON. table_files.py reads tables.

Any exception while a file is read becomes `Unreadable`: one line with the file and the library's own message.

>>> from_json("[1, 2")
Traceback (most recent call last):
...
grpo_math.system.reading.Unreadable: JSONDecodeError: Expecting ',' delimiter: line 1 column 6 (char 5)
"""

import json
import os
import re
from ast import literal_eval
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_math.errors import UserError, nearest_name

# A literal of Python, or what numpy prints instead of a comma and around the items of an array.
NUMPY = re.compile(
    r"""(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|['"].*)"""
    r"""|(?P<array>array\(|,\s*dtype=\w+\)|(?<=\])\))|(?<=['"}\]\d.])\s+(?=['"{\[\d-])""",
    re.DOTALL,
)


class Unreadable(UserError, ValueError):
    """A file, or a text in a file, that cannot be read. ``reason`` is the library's own message."""

    def __init__(self, error: Exception, path: str | Path | None = None) -> None:
        words = " ".join(str(error).split())[:300]
        self.reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {words}"
        similar = near(path) if path is not None and isinstance(error, FileNotFoundError) else ""
        remedies = {IsADirectoryError: "name a file in this folder", UnicodeDecodeError: "save it in UTF-8"}
        remedy = similar or remedies.get(type(error), "correct the path or the file")
        super().__init__(self.reason if path is None else f"{path} cannot be read ({self.reason}): {remedy}")


def near(path: str | Path) -> str:
    """Return ``did you mean runs/demo?`` for a path that does not exist, if a neighbour has a similar name; or ""."""
    path = Path(path)
    names = () if path.exists() else (neighbour.name for neighbour in path.parent.glob("*"))
    similar = nearest_name(path.name, names)
    return f"did you mean {path.parent / similar}?" if similar else ""


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn any exception in the block, which reads a file of the user, into one line that names the file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise Unreadable(error, path) from None


def from_json(content: str | bytes) -> Any:
    """Return the value of a JSON text. Raises `Unreadable`, also for a text that is nested too deeply."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Unreadable(error) from None


def from_cell(content: Any) -> Any:
    r"""Return the list or the mapping that a table stored as text: JSON, Python, or numpy; else the content.

    >>> from_cell("{'label': array(['A', 'B'], dtype=object)}"), from_cell("[{'a': \"It's\"}\n {'a': '1'}]")
    ({'label': ['A', 'B']}, [{'a': "It's"}, {'a': '1'}])
    >>> from_cell('["7", null]'), from_cell("[3, 5)"), from_cell("{1, 2}"), from_cell(7)
    (['7', None], '[3, 5)', '{1, 2}', 7)
    """
    text = content.strip() if isinstance(content, str) else ""
    if not text.startswith(("[", "{")):
        return content
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        value = literal_eval(NUMPY.sub(lambda part: part["text"] or ("" if part["array"] else ", "), text))
        return value if isinstance(value, list | dict) else content
    return content


def read_json(path: str | Path) -> Any:
    """Return the value of a JSON file. Raises `Unreadable`."""
    with reading(path):
        # Read bytes: json.loads then recognizes UTF-16 and a byte order mark.
        return json.loads(Path(path).read_bytes())


def home(path: str | Path) -> Path:
    """Return the path with ``~`` as the user's folder."""
    return Path(os.path.expanduser(path))


def read_object(path: str | Path) -> dict[str, Any] | None:
    """Return the object of a JSON file; None if there is no such file, or if it contains something else."""
    try:
        value = read_json(path)
    except Unreadable:
        return None
    return value if isinstance(value, dict) else None


def is_folder(name: str) -> bool:
    """Return True if a model name is a local folder, and False if it is a Hub id. Recipes write runs to ``runs/``.

    >>> is_folder("Qwen/Qwen2.5-1.5B"), is_folder("./models/mine"), is_folder("models/mine/checkpoint-3")
    (False, True, True)
    >>> is_folder("runs/mine")
    True
    """
    return os.path.exists(home(name)) or name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1
