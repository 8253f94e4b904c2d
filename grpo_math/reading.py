"""Files from outside -> text, JSON, YAML, in time and memory that go with their size; else one reason why not.

A file is a regular one: a pipe or a device would be waited for, or would never end. A byte order mark is passed over.
Of YAML, a date, and a number that counts in sixties, stay the text that they are.

>>> from_yaml("seed: 1:30\\nborn: 2020-13-45")
{'seed': '1:30', 'born': '2020-13-45'}
>>> from_json("[" * 100_000)
Traceback (most recent call last):
...
grpo_math.reading.Unreadable: is not JSON (it is nested too deeply)

Does not know what a file should hold.
"""

import json
import os
import stat
from collections.abc import Hashable
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from grpo_math.errors import cut, first_line

YAML_CHARACTERS = 500_000  # a recipe has a few thousand
YAML_VALUES = 50_000
YAML_DEPTH = 40
NUMBER_CHARACTERS = 100
TEXT = "tag:yaml.org,2002:str"
BOM = b"\xef\xbb\xbf"


class Unreadable(ValueError):
    """``str(error)`` is the reason, as in ``is not UTF-8 (byte 7)``; who reads adds the field and the remedy."""


def read_bytes(path: str | Path) -> bytes:
    """Of a regular file, without a byte order mark. Raises `Unreadable`."""
    try:
        if not stat.S_ISREG((found := os.stat(path)).st_mode) and not stat.S_ISDIR(found.st_mode):
            raise Unreadable("is a pipe or a device, and no file")
        return Path(path).read_bytes().removeprefix(BOM)
    except (OSError, ValueError) as error:  # a ValueError: the path holds a NUL, or is no text of this machine
        if isinstance(error, Unreadable):
            raise
        said = getattr(error, "strerror", None) or "its name is none that a file can have"
        raise Unreadable(f"cannot be read ({said})") from None


def decoded(content: bytes) -> str:
    """UTF-8 as text. Raises `Unreadable`."""
    try:
        return content.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"is not UTF-8 (byte {error.start})") from None


def read_text(path: str | Path) -> str:
    """A regular file's text. Raises `Unreadable`."""
    return decoded(read_bytes(path))


def from_json(content: str | bytes) -> Any:
    """The value that one JSON text holds. Raises `Unreadable` for what is none, is nested too deeply, or has a number
    of thousands of digits."""
    text = decoded(content) if isinstance(content, bytes) else content
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise Unreadable(f"is not JSON ({error.msg}, {line}column {error.colno})") from None
    except RecursionError:
        raise Unreadable("is not JSON (it is nested too deeply)") from None
    except ValueError as error:
        raise Unreadable(f"is not JSON ({first_line(error).partition(';')[0]})") from None


def read_json(path: str | Path) -> Any:
    """The value that a JSON file holds. Raises `Unreadable`."""
    return from_json(read_bytes(path))


def home(path: str | Path) -> Path:
    """The path with ``~`` as the user's folder; one of a user that there is not stays as it is."""
    return Path(os.path.expanduser(path))


def real(path: str | Path) -> Path:
    """The path without links; a loop of links stays as it is, where ``Path.resolve`` would raise."""
    return Path(os.path.realpath(path))


def read_object(path: str | Path) -> dict[str, Any] | None:
    """The object that a JSON file holds; None where there is no such file, or it holds something else."""
    try:
        found = read_json(path)
    except Unreadable:
        return None
    return found if isinstance(found, dict) else None


def from_yaml(content: str | bytes, strict: bool = False) -> Any:
    """The value of one YAML document; ``strict``: a name that is given twice is refused. Raises `Unreadable`, also for
    a document that is too large, too deep, or too large once its aliases are written out."""
    text = decoded(content) if isinstance(content, bytes) else content
    if len(text) > YAML_CHARACTERS:
        raise Unreadable(f"is YAML of {len(text):,} characters, and {YAML_CHARACTERS:,} are read at most")
    try:
        return yaml.load(text, _Strict) if strict else yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, ArithmeticError) as error:  # the latter: a character that there is not
        raise Unreadable(f"is not YAML ({' '.join(str(error).split())[:300]})") from None


def read_yaml(path: str | Path, strict: bool = False) -> Any:
    """The value that a YAML file holds. Raises `Unreadable`."""
    return from_yaml(read_bytes(path), strict)


class _Loader(yaml.SafeLoader):
    """Nested so deeply, and with its aliases so large, at most; a value that cannot be built is named."""

    depth = 0

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.sizes: dict[int, int] = {}  # of each node that is composed, with its aliases written out

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)
        if kind is yaml.ScalarNode and implicit[0] and tag.rpartition(":")[2] in ("timestamp", "int", "float"):
            return TEXT if tag.endswith("timestamp") or ":" in value or len(value) > NUMBER_CHARACTERS else tag
        return tag

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        self.depth += 1
        if self.depth > YAML_DEPTH:
            raise _wrong(event.start_mark, f"more than {YAML_DEPTH} lists and mappings in each other")
        node: Any = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(event, yaml.AliasEvent) and id(node) not in self.sizes:
            raise _wrong(event.start_mark, "a value that holds itself")
        if id(node) not in self.sizes:
            inside = [] if isinstance(node, yaml.ScalarNode) else node.value
            parts = [part for one in inside for part in (one if isinstance(one, tuple) else [one])]
            self.sizes[id(node)] = 1 + sum(self.sizes[id(part)] for part in parts)
        if self.sizes[id(node)] > YAML_VALUES:
            raise _wrong(event.start_mark, f"more than {YAML_VALUES:,} values, with what aliases stand for")
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            found = super().construct_object(node, deep)
            if isinstance(found, bytes | set | date) or (isinstance(found, int) and found.bit_length() > 400):
                raise ValueError
            return found
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError):  # of a tag's own parser
            said = cut(node.value) if isinstance(node, yaml.ScalarNode) else "a value"
            tag = node.tag.rpartition(":")[2]
            raise _wrong(node.start_mark, f"{said} is no {tag} that a setting can have") from None


class _Strict(_Loader):
    """YAML in which a field that is given twice is an error: the first would be ignored."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _wrong(key.start_mark, "a name is a list or a mapping")
            if key.value in seen:
                raise _wrong(key.start_mark, f"{cut(key.value)} is given twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _wrong(mark: Any, said: str) -> yaml.YAMLError:
    return yaml.YAMLError(f"{said}, in line {mark.line + 1}")
