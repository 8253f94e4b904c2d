r"""Files of tables -> numbered rows, in three steps.

encodings.py decodes a file, a parser reads its records, and `rows` names the cells of records that are lists.

>>> [*rows(enumerate([["problem", "answer"], ["3 + 4", "7"], ["", ""], ["1", "2", "3"]], 1))]
[(2, {'problem': '3 + 4', 'answer': '7'}), (4, {'fault of a row': 'has more cells than the file has columns'})]
"""

import csv
import json
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from typing import Any

from grpo_math.errors import UserError
from grpo_math.system.encodings import decoded, opened, uncompressed
from grpo_math.system.reading import home, reading

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


def is_table(path: str | Path) -> bool:
    """Return True for a file, and for a name that ends like that of a table.

    >>> is_table("a.jsonl.gz"), is_table("a.parquet"), is_table("owner/name"), is_table(__file__)
    (True, True, False, True)
    """
    return uncompressed(path).endswith(TABLES) or os.path.isfile(home(path))


def read_table(path: str | Path, split: str = "") -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file and their numbers: a line of JSON as bytes, any other row as its library reads it.

    ``split`` selects a list of ``{"train": [...], "test": [...]}``. Raises `Unreadable`. Every cell of a CSV file is
    text, so that ``007`` and ``1.50`` stay as they are. Lines of JSON, CSV and Parquet are read as they are needed.
    """
    name = uncompressed(path)
    # Everything is read inside the block, so that a damaged file is reported with its name.
    with reading(path), opened(path) as file:
        if name.endswith(".parquet"):
            # A Parquet file is read from its end, and a compressed file can only be read from its start.
            yield from parquet_rows(file if name == str(path) else BytesIO(file.read()))
            return
        start = file.peek(8).lstrip()
        if name.endswith(".xlsx") and start.startswith(b"PK"):
            yield from rows(sheet_records(path, BytesIO(file.read()), split))
            return
        if form := next((form for mark, form in FORMS.items() if start.startswith(mark)), None):
            raise UserError(f"{path} is {form.format(path)}")
        lines = decoded(path, file)
        yield from rows(csv_records(lines)) if name.endswith((".csv", ".tsv")) else json_rows(path, lines, split)


def rows(records: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield a row for each record after the first one, which has the names. An exception becomes the row's fault.

    An empty cell is None. A spreadsheet appends empty rows and empty columns, which are left out.
    """
    names: list[str] = []
    for number, record in records:
        if isinstance(record, Exception):
            if not names:
                raise record
            yield number, {FAULT: f"cannot be read ({record})"}
        elif not any(map(_has_content, record)):
            continue
        elif not names:
            names = ["" if name is None else str(name) for name in record]
            # The last of two columns with one name would silently replace the first. Empty names: trailing commas.
            stated = [name for name in names if name.strip()]
            if repeated := [name for name in stated if stated.count(name) > 1]:
                raise ValueError(f"two columns are named {repeated[0]!r}")
        elif any(map(_has_content, record[len(names) :])):
            yield number, {FAULT: "has more cells than the file has columns"}
        else:
            padded = [*record, *[None] * (len(names) - len(record))]
            yield number, {name: None if cell == "" else cell for name, cell in zip(names, padded, strict=False)}


def _has_content(cell: Any) -> bool:
    return cell is not None and not (isinstance(cell, str) and (not cell or cell.isspace()))


def parquet_rows(file: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    from pyarrow import dataset

    batches = dataset.ParquetFileFormat().make_fragment(file).to_batches(batch_size=PARQUET_ROWS)
    return enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1)


def sheet_records(path: str | Path, file: Any, split: str) -> Iterable[tuple[int, Any]]:
    """Return the records of an Excel sheet, named like the split or the only one."""
    try:
        from openpyxl import load_workbook
    except ImportError:
        remedy = f"pip install 'grpo_math[excel]' reads it, or {AS_CSV}"
        raise UserError(f"{path} is a workbook: {remedy}") from None
    book = load_workbook(file, read_only=True, data_only=True)
    sheets = {one.title: [*enumerate(one.iter_rows(values_only=True), 1)] for one in book.worksheets}
    filled = {
        title: records
        for title, records in sheets.items()
        if any(map(_has_content, chain(*(row for _, row in records))))
    }
    return _part(path, filled, split, "sheets")


def csv_records(lines: Iterator[str]) -> Iterator[tuple[int, Any]]:
    """Yield the records of a CSV file with the number of their last line.

    A record that cannot be read is an exception, with the number of its first line. The next record begins in the line
    after this one: a quote without an end would otherwise take the rest of the file.
    """
    # csv refuses a cell of more than 131,072 characters. A reasoning trace may be longer.
    csv.field_size_limit(sys.maxsize)
    head = next(lines, "")
    delimiter = max(",;\t", key=head.count)
    ahead, taken, number = deque([head]), list[str](), 0

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


def json_rows(path: str | Path, texts: Iterable[str], split: str) -> Iterable[tuple[int, Any]]:
    """Return the lines of JSON as bytes, or the items of one JSON text."""
    numbered = ((number, text.removesuffix("\n")) for number, text in enumerate(texts, 1) if text.strip())
    lines = ((number, text.encode(errors="surrogateescape")) for number, text in numbered)
    head = [*islice(lines, 2)]
    first = head[0][1] if head else b""
    if head and not uncompressed(path).endswith(TABLES) and not first.lstrip().startswith((b"[", b"{")):
        remedy = "end the name of a table in .csv or .tsv, and write its columns in the first line"
        raise UserError(f"{path} is text without JSON: {remedy}, or write one JSON object per line")
    # Only lines of JSON have a value in the first line, and more text below.
    is_lines = len(head) == 2 and _is_value(first)
    return chain(head, lines) if is_lines else _items(path, [*head, *lines], split)


def _is_value(line: bytes) -> bool:
    """Return True if a line begins with a whole JSON value.

    >>> [_is_value(line) for line in (b' {"a": 1}', b"{", b"[1]", b"[1,", b"")]
    [True, False, True, False, False]
    """
    with suppress(ValueError, RecursionError):
        json.JSONDecoder().raw_decode(line.decode().strip())
        return True
    return False


def _items(path: str | Path, lines: list[tuple[int, bytes]], split: str) -> Iterable[tuple[int, Any]]:
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
