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
import gzip
import json
import logging
import lzma
import os
import re
import sys
from ast import literal_eval
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedReader, BytesIO, TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import Any

from grpo_math.errors import UserError, nearest_name

logger = logging.getLogger(__name__)

UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".xlsx")
LISTS = ("train", "test", "validation", "valid", "dev", "data", "rows", "examples", "problems", "questions", "items")
PARQUET_ROWS = 1000  # rows of a Parquet file in memory
FAULT = "fault of a row"  # the key of the reason in a row that a table does not contain as it should
AS_CSV = "save the sheet as 'CSV UTF-8' in Excel, or as 'Text CSV' in LibreOffice"
AN_ARROW_FILE = (
    'an Arrow file: write lines of JSON, python -c "from datasets import load_dataset; '
    "load_dataset('arrow', data_files='{0}', split='train').to_json('{0}.jsonl')\""
)
# How a file of another form begins -> the form and the remedy.
FORMS = {
    b"PK\x03\x04": f"a workbook or an archive: {AS_CSV}; unpack an archive",
    b"\xd0\xcf\x11\xe0": f"a workbook of an old Excel: {AS_CSV}",
    b"<": "a web page: download the file itself",
    b"ARROW1": AN_ARROW_FILE,
    b"\xff\xff\xff\xff": AN_ARROW_FILE,
    b"PAR1": "a Parquet file: end its name with .parquet",
}
# The encodings of Excel and Windows, and the letters that make up at least this share of a text in them.
ENCODINGS = (("cp932", "[ぁ-んァ-ヶ]", 0.2), ("cp949", "[가-힣]", 0.9))
LETTERS = re.compile(r"[^\W\d_A-Za-z]")  # except for those of ASCII
# A literal of Python, or what numpy prints instead of a comma and around the items of an array.
NUMPY = re.compile(
    r"""(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|['"].*)"""
    r"""|(?P<array>array\(|,\s*dtype=\w+\)|(?<=\])\))|(?<=['"}\]\d.])\s+(?=['"{\[\d-])""",
    re.DOTALL,
)


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
    name = uncompressed(path)
    # Everything is read inside the block, so that a damaged file is reported with its name.
    with reading(path), _opened(path) as file:
        if name.endswith(".parquet"):
            # A Parquet file is read from its end, and a compressed file can only be read from its start.
            yield from enumerate(_parquet_rows(file if name == str(path) else BytesIO(file.read())), 1)
            return
        start = file.peek(8).lstrip()
        if name.endswith(".xlsx") and start.startswith(b"PK"):
            yield from _sheet(path, BytesIO(file.read()), split)
            return
        if form := next((form for mark, form in FORMS.items() if start.startswith(mark)), None):
            raise UserError(f"{path} is {form.format(path)}")
        # A byte that is not in the encoding becomes half a character, so that its row alone is refused.
        lines = TextIOWrapper(file, _encoding(path), "surrogateescape", newline="")
        if name.endswith((".csv", ".tsv")):
            yield from _cells(lines)
            return
        texts = ((number, line.removesuffix("\n")) for number, line in enumerate(lines, 1) if line.strip())
        rows = ((number, text.encode(errors="surrogateescape")) for number, text in texts)
        head = [*islice(rows, 2)]
        first = head[0][1] if head else b""
        if head and not name.endswith(TABLES) and not first.lstrip().startswith((b"[", b"{")):
            remedy = "end the name of a table in .csv or .tsv, and write its columns in the first line"
            raise UserError(f"{path} is text without JSON: {remedy}, or write one JSON object per line")
        # Only lines of JSON have a value in the first line, and more text below.
        is_lines = len(head) == 2 and _is_value(first)
        yield from chain(head, rows) if is_lines else _json_rows(path, [*head, *rows], split)


def _opened(path: str | Path) -> Any:
    return OPENERS.get(os.path.splitext(path)[1], open)(path, "rb")


def _encoding(path: str | Path) -> str:
    """Return the encoding of a text file: that of the first line that is not in ASCII."""
    with _opened(path) as file:
        if file.peek(2).startswith(UTF_16):  # as Excel and PowerShell write text
            return "utf-16"
        ahead, line = next((pair for pair in enumerate(file) if not pair[1].isascii()), (0, b""))
        try:
            line.decode()
        except UnicodeDecodeError:
            content = line + file.read()
            if encoding := _encoding_of_windows(content):
                _note(path, encoding)
                return encoding
            # A text in an encoding that is not known, and not some damaged lines.
            if 2 * sum(not part.isascii() for part in content.splitlines()) >= ahead:
                raise
    return "utf-8-sig"


def _encoding_of_windows(content: bytes) -> str | None:
    """Return the encoding of a text that is not UTF-8; None for damaged UTF-8 and for other encodings.

    >>> texts = (("정답", "cp949"), ("答え", "cp932"), ("größer", "cp1252"))
    >>> [_encoding_of_windows(text.encode(name)) for text, name in texts]
    ['cp949', 'cp932', 'cp1252']
    >>> texts = ("größer".encode() + b"\\xff", "Сколько".encode("cp1251"), "多少".encode("gbk"))
    >>> [_encoding_of_windows(text) for text in texts]
    [None, None, None]
    """
    text = content.decode(errors="replace")
    if len(LETTERS.findall(text)) > text.count("\ufffd"):
        return None
    for encoding, usual, share in ENCODINGS:
        with suppress(UnicodeDecodeError):
            text = content.decode(encoding)
            if len(re.findall(usual, text)) >= share * len(LETTERS.findall(text)) > 0:
                return encoding
    with suppress(UnicodeDecodeError):
        text = content.decode("cp1252")
        # Letters with accents are next to plain ones. Three in a row are of another encoding.
        return None if re.search(r"[^\x00-\x7f]{3}", text) else "cp1252"
    return None


@cache
def _note(path: str | Path, encoding: str) -> None:
    logger.warning(f"{path} is not in UTF-8, and is read as {encoding}: if letters are wrong, save it in UTF-8")


def _is_value(line: bytes) -> bool:
    """Return True if a line begins with a whole JSON value.

    >>> [_is_value(line) for line in (b' {"a": 1}', b"{", b"[1]", b"[1,", b"")]
    [True, False, True, False, False]
    """
    with suppress(ValueError, RecursionError):
        json.JSONDecoder().raw_decode(line.decode().strip())
        return True
    return False


def _parquet_rows(file: Any) -> Iterator[dict[str, Any]]:
    from pyarrow import dataset

    for batch in dataset.ParquetFileFormat().make_fragment(file).to_batches(batch_size=PARQUET_ROWS):
        yield from batch.to_pylist()


def _json_rows(path: str | Path, lines: list[tuple[int, bytes]], split: str) -> Iterable[tuple[int, Any]]:
    """Return the rows of a JSON text: a list, an object that may hold the rows, or else its lines."""
    text = b"\n".join(line for _, line in lines)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        if text.lstrip().startswith(b"["):
            raise
        # A bad line is named by its number.
        return lines
    remedy = "write one object per line, with pandas: to_json(FILE, orient='records', lines=True)"
    if isinstance(value, dict):
        lists = {name: part for name, part in value.items() if name in LISTS and isinstance(part, list)}
        # As pandas writes a table by default. A row has a text.
        if not lists and value and all(isinstance(part, list | dict) and part for part in value.values()):
            raise UserError(f"{path} is one object of columns: {remedy}")
        value = _part(path, lists, split, "lists") if lists else value
    # The cells of pandas' orient="split" or "values".
    if isinstance(value, list) and value and all(isinstance(row, list) for row in value):
        raise UserError(f"{path} has lists as rows, without the names of their columns: {remedy}")
    return enumerate(value if isinstance(value, list) else [value], 1)


def _part(path: str | Path, parts: dict[str, Any], split: str, kind: str) -> Any:
    """Return the part of a file that is named like the split, or the only part."""
    if len(parts) > 1 and split not in parts:
        raise UserError(f"{path} contains the {kind} {', '.join(parts)}: name one as the split")
    return parts.get(split) or next(iter(parts.values()), [])


def _sheet(path: str | Path, file: Any, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of an Excel sheet, named like the split or the only one, with their numbers."""
    try:
        from openpyxl import load_workbook
    except ImportError:
        remedy = f"pip install 'grpo_math[excel]' reads it, or {AS_CSV}"
        raise UserError(f"{path} is a workbook: {remedy}") from None
    book = load_workbook(file, read_only=True, data_only=True)
    sheets = {sheet.title: [*enumerate(sheet.iter_rows(values_only=True), 1)] for sheet in book.worksheets}
    filled = {title: rows for title, rows in sheets.items() if any(map(_has_content, chain(*(row for _, row in rows))))}
    return _rows(_part(path, filled, split, "sheets"))


def _cells(lines: TextIOWrapper) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a CSV file with the number of their last line. An empty cell is None."""
    # csv refuses a cell of more than 131,072 characters. A reasoning trace may be longer.
    csv.field_size_limit(sys.maxsize)
    head = lines.readline()
    return _rows(_records(chain([head], lines), max(",;\t", key=head.count)))


def _rows(records: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield a row for each record after the first one, which has the names. An exception becomes the row's fault.

    A spreadsheet appends empty rows and empty columns, which are left out.
    """
    names: list[str] = []
    for number, cells in records:
        if isinstance(cells, Exception):
            if not names:
                raise cells
            yield number, {FAULT: f"cannot be read ({cells})"}
        elif not any(map(_has_content, cells)):
            continue
        elif not names:
            names = ["" if name is None else str(name) for name in cells]
            # The last of two columns with one name would silently replace the first. Empty names: trailing commas.
            stated = [name for name in names if name.strip()]
            if repeated := [name for name in stated if stated.count(name) > 1]:
                raise ValueError(f"two columns are named {repeated[0]!r}")
        elif any(map(_has_content, cells[len(names) :])):
            yield number, {FAULT: "has more cells than the file has columns"}
        else:
            padded = [*cells, *[None] * (len(names) - len(cells))]
            yield number, {name: None if cell == "" else cell for name, cell in zip(names, padded, strict=False)}


def _has_content(cell: Any) -> bool:
    return cell is not None and not (isinstance(cell, str) and (not cell or cell.isspace()))


def _records(lines: Iterator[str], delimiter: str) -> Iterator[tuple[int, Any]]:
    """Yield the records of a CSV file with the number of their last line.

    A record that cannot be read is an exception, with the number of its first line. The next record begins in the line
    after this one: a quote without an end would otherwise take the rest of the file.
    """
    ahead, taken, number = deque[str](), list[str](), 0

    def taking() -> Iterator[str]:
        while line := ahead.popleft() if ahead else next(lines, ""):
            taken.append(line)
            yield line

    while True:
        try:
            # strict refuses a quote without an end, and text after a quote.
            for cells in csv.reader(taking(), delimiter=delimiter, strict=True):
                number += len(taken)
                taken.clear()
                if cells:
                    yield number, cells
            return
        except csv.Error as error:
            number += 1
            ahead.extendleft(reversed(taken[1:]))
            taken.clear()
            yield number, error


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
