r"""Files of the user -> text, JSON or rows of a table.

Any exception while a file is read becomes `Unreadable`: one line with the file and the library's own message.

>>> from_json("[1, 2")
Traceback (most recent call last):
...
grpo_math.system.reading.Unreadable: JSONDecodeError: Expecting ',' delimiter: line 1 column 6 (char 5)
"""

import bz2
import codecs
import csv
import difflib
import gzip
import json
import lzma
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, BytesIO, StringIO
from itertools import chain
from pathlib import Path
from typing import Any

from grpo_math.errors import UserError

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
LISTS = ("train", "test", "validation", "valid", "dev", "data", "rows", "examples", "problems", "questions", "items")
SPACE = re.compile(r"\s*")
PARQUET_ROWS = 1000  # rows of a Parquet file in memory
EXTRA = "cells without a column"  # the key of a CSV row's surplus cells


def _open_zst(path: str | Path, mode: str) -> Any:
    from pyarrow import input_stream

    return BufferedReader(input_stream(str(path)))


# The ending of a compressed file -> the function that opens it.
OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zst}


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
    names = [] if path.exists() else [neighbour.name for neighbour in path.parent.glob("*")]
    similar = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / similar[0]}?" if similar else ""


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


def read_json(path: str | Path) -> Any:
    """Return the value of a JSON file. Raises `Unreadable`."""
    with reading(path):
        # Read bytes: json.loads then recognizes UTF-16 and a byte order mark.
        return json.loads(Path(path).read_bytes())


def is_table(path: str | Path) -> bool:
    """Return True for a file, and for a name that ends like that of a table.

    >>> is_table("a.jsonl.gz"), is_table("a.parquet"), is_table("owner/name"), is_table(__file__)
    (True, True, False, True)
    """
    return uncompressed(path).endswith(TABLES) or os.path.isfile(home(path))


def uncompressed(path: str | Path) -> str:
    """Return a file's name without the ending of its compression.

    >>> uncompressed("a.csv.xz"), uncompressed("a.csv")
    ('a.csv', 'a.csv')
    """
    stem, ending = os.path.splitext(path)
    return stem if ending in OPENERS else str(path)


def read_table(path: str | Path, split: str = "") -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file and their numbers: a line of JSON as bytes, any other row as its library reads it.

    ``split`` selects a list of ``{"train": [...], "test": [...]}``. Raises `Unreadable`. Every cell of a CSV file is
    text, so that ``007`` and ``1.50`` stay as they are. Lines of JSON, CSV and Parquet are read as they are needed.
    """
    name, ending = uncompressed(path), os.path.splitext(path)[1]
    # Everything is read inside the block, so that a damaged file is reported with its name.
    with reading(path), OPENERS.get(ending, open)(path, "rb") as file:
        if name.endswith(".parquet"):
            # A Parquet file is read from its end, and a compressed file can only be read from its start.
            yield from enumerate(_parquet_rows(BytesIO(file.read()) if ending in OPENERS else file), 1)
            return
        head = _through_text(file)
        if head.startswith(b"PK\x03\x04"):
            remedy = "save the sheet as 'CSV UTF-8' in Excel, or as 'Text CSV' in LibreOffice; unpack an archive"
            raise UserError(f"{path} is a workbook or an archive: {remedy}")
        if head.startswith(b"<"):
            raise UserError(f"{path} is a web page: download the file itself")
        if head.startswith(UTF_16):  # as Excel and PowerShell write text
            file = BytesIO((head + file.read()).decode("utf-16").encode())
            head = _through_text(file)
        head = head.removeprefix(codecs.BOM_UTF8)
        if name.endswith((".csv", ".tsv")):
            yield from _cells(chain(BytesIO(head), file), head.decode().partition("\n")[0])
            return
        second = _through_text(file)
        # Only lines of JSON have a value in the first line, and more text below.
        if second.strip() and _is_value(head):
            yield from _lines(chain(BytesIO(head + second), file))
        else:
            yield from _json_rows(path, head + second + file.read(), split)


def _through_text(file: Any) -> bytes:
    """Return the bytes up to the end of the first line that is not blank."""
    head = b""
    while not head.strip() and (line := file.readline()):
        head += line
    return head


def _is_value(line: bytes) -> bool:
    """Return True if a line begins with a whole JSON value, except for a list.

    >>> [_is_value(line) for line in (b' {"a": 1}', b"{", b"[1]", b"")]
    [True, False, False, False]
    """
    with suppress(ValueError, RecursionError):
        return not isinstance(json.JSONDecoder().raw_decode(line.decode().strip())[0], list)
    return False


def _parquet_rows(file: Any) -> Iterator[dict[str, Any]]:
    from pyarrow import dataset

    for batch in dataset.ParquetFileFormat().make_fragment(file).to_batches(batch_size=PARQUET_ROWS):
        yield from batch.to_pylist()


def _lines(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    return ((number, line.removesuffix(b"\n")) for number, line in enumerate(lines, 1) if line.strip())


def _json_rows(path: str | Path, content: bytes, split: str) -> Iterable[tuple[int, Any]]:
    """Return the rows of a JSON text: a list, an object that may hold the rows, or objects over several lines."""
    if content.lstrip().startswith(b"["):
        return enumerate(json.loads(content), 1)
    with suppress(ValueError, RecursionError):
        text = content.decode().strip()
        first, end = json.JSONDecoder().raw_decode(text)
        if end == len(text) or "\n" in text[:end]:
            return enumerate(_listed(path, first, split) or _objects(text), 1)
    # A bad line is named by its number.
    return _lines(BytesIO(content))


def _listed(path: str | Path, value: Any, split: str) -> list[Any]:
    """Return the list of rows in an object like ``{"train": [...]}``: the list of the split, or the only one."""
    items = value.items() if isinstance(value, dict) else ()
    lists = {name: part for name, part in items if name in LISTS and isinstance(part, list)}
    if len(lists) > 1 and split not in lists:
        raise UserError(f"{path} contains the lists {', '.join(lists)}: name one as the split")
    return lists.get(split) or next(iter(lists.values()), [])


def _objects(text: str) -> list[Any]:
    """Return the JSON values of a text.

    >>> _objects('{"a": 1} {\\n"a": 2}')
    [{'a': 1}, {'a': 2}]
    """
    values, decoder, position = [], json.JSONDecoder(), 0
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        values.append(value)
        position = SPACE.match(text, position).end()  # type: ignore[union-attr]
    return values


def _cells(lines: Iterable[bytes], header: str) -> Iterator[tuple[int, dict[str, str | None]]]:
    """Yield the rows of a CSV file with the number of their last line. An empty cell is None."""
    # csv refuses a cell of more than 131,072 characters. A reasoning trace may be longer.
    csv.field_size_limit(sys.maxsize)
    # newline="" keeps a line break in a quoted cell. strict refuses a quote without an end, which would
    # otherwise take the rest of the file into one cell.
    texts = (text for line in _decoded(lines) for text in StringIO(line, newline=""))
    rows = csv.DictReader(texts, restkey=EXTRA, delimiter=max(",;\t", key=header.count), strict=True)
    # The last of two columns with one name would silently replace the first. Empty names come from trailing commas.
    names = [name for name in rows.fieldnames or () if name.strip()]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two columns are named {repeated[0]!r}")
    return ((rows.line_num, {name: cell or None for name, cell in row.items()}) for row in rows)


def _decoded(lines: Iterable[bytes]) -> Iterator[str]:
    """Decode lines. An error counts the bytes from the start of the file."""
    start = 0
    for line in lines:
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            content, first, end = bytes(start) + line, start + error.start, start + error.end
            raise UnicodeDecodeError(error.encoding, content, first, end, error.reason) from None
        start += len(line)


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
