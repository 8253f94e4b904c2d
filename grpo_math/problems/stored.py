r"""Rows on disk: those of the first pass for the passes after it, and the problems of a large set for all later runs.

>>> rows = Stored({"id": str(number)} for number in range(IN_MEMORY + BATCH + 1))
>>> len(rows), sum(1 for _ in rows), next(iter(rows))
(21001, 21001, {'id': '0'})

The problems of a large set are an Arrow file in the cache of `datasets`. Its folder is named after everything that the
problems depend on: the content of the data, the settings, and the code of this package. The first process that needs
the problems writes the file, and the other processes of the machine wait for it. They map it into their memory.
"""

import logging
import os
import pickle  # noqa: TID251 -- of an unnamed file, which no other process can open
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from grpo_math.errors import first_line
from grpo_math.problems.problem import Problem
from grpo_math.reading import Unreadable, read_json
from grpo_math.run.bar import Bar
from grpo_math.run.files import flush, write_json

logger = logging.getLogger(__name__)

BATCH = 1000  # rows that are written and read at once
IN_MEMORY = 20_000  # the first rows, which are not written to a temporary file
ROWS, NOTES = "rows.arrow", "notes.json"


def batches(rows: Iterable[Any], size: int = BATCH) -> Iterator[list[Any]]:
    """Yield lists of ``size`` rows, and a last one that may be shorter."""
    rows = iter(rows)
    return iter(lambda: list(islice(rows, size)), [])


def bar(rows: Iterable[Any], doing: str, total: int | None = None, is_large: bool | None = None) -> Iterable[Any]:
    """Return the rows with a progress bar on the main process, if they are many and take longer than a second."""
    is_large = (total or 0) > IN_MEMORY if is_large is None else is_large
    return Bar(rows, doing, total, unit=" rows", delay=1) if is_large and not _is_other_process() else rows


def _is_other_process() -> bool:
    return os.environ.get("RANK", "0") != "0"


class Stored:
    """Rows that are read several times, and may be too many for the memory."""

    def __init__(self, rows: Iterable[Any]) -> None:
        rows = iter(rows)
        self._first = list(islice(rows, IN_MEMORY))
        self._starts: list[int] = []
        self._last: list[Any] = []
        self._n = len(self._first)
        for batch in batches(rows):
            try:
                self._write(batch)
            except OSError as error:
                logger.warning(f"the rows stay in memory: a temporary file cannot be written ({error.strerror})")
                self._last = [*batch, *rows]
            self._n += len(self._last or batch)

    def _write(self, batch: list[Any]) -> None:
        if not self._starts:
            self._file = TemporaryFile()  # noqa: SIM115 -- closed with the rows
        start = self._file.tell()
        pickle.dump(batch, self._file)
        # A full disk is noticed here, before the batch counts as written.
        self._file.flush()
        self._starts.append(start)

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[Any]:
        yield from self._first
        for start in self._starts:
            self._file.seek(start)
            yield from pickle.load(self._file)  # noqa: S301
        yield from self._last


class Read(NamedTuple):
    """The problems of a data set, which are made as they are needed, and Arrow's types of some of their columns."""

    n: int
    problems: Iterator[Problem]
    types: Mapping[str, Any]


def table(name: str, depends_on: object, read: Callable[[Callable[[str], None]], Read]) -> Any:
    """Return the problems that ``read`` returns as a `datasets.Dataset`, from the cache if they are there.

    ``name`` is the data set's, for messages. ``depends_on`` is everything that changes the problems, except for code.
    ``read`` gets a function that takes warnings. They are logged each time, also if nothing is read.
    """
    import datasets
    from filelock import FileLock

    key = sha256(repr((_code(), datasets.__version__, depends_on)).encode()).hexdigest()[:32]
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "grpo_math" / key
    notes: list[str] = []
    line = f"the problems of {name} are in {folder}, as an earlier process prepared them"
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):
                # Another process may have written the folder while this one waited.
                if not folder.is_dir():
                    _write_folder(folder, read(notes.append), notes)
                    line = f"the problems of {name} are kept in {folder}, and used again"
        rows, notes = datasets.Dataset.from_file(str(folder / ROWS)), read_json(folder / NOTES)
    # NotImplementedError: a file system without locks.
    except (OSError, NotImplementedError) as error:
        import pyarrow

        reason = getattr(error, "strerror", None) or first_line(error)
        line = f"the problems of {name} are prepared in memory: {folder.parent} cannot be written ({reason})"
        sink, notes = pyarrow.BufferOutputStream(), []
        _write_rows(sink, read(notes.append))
        rows = datasets.Dataset.from_buffer(sink.getvalue())
    if not _is_other_process():
        print(line, file=sys.stderr)
    for note in notes:
        logger.warning(note)
    return rows


@cache
def _code() -> str:
    """Return a hash of this package: another version may read the same data in another way."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _write_folder(folder: Path, read: Read, notes: list[str]) -> None:
    """Write the folder under another name and rename it: a kill at any moment leaves no folder, or a whole one."""
    scratch = folder.with_suffix(".part")
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    scratch.mkdir()
    try:
        with open(scratch / ROWS, "wb") as file:
            _write_rows(file, read)
        flush(scratch / ROWS)
        write_json(scratch / NOTES, notes)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_rows(sink: Any, read: Read) -> None:
    """Write problems to a file of Arrow's stream format."""
    import pyarrow

    writer = None
    for batch in batches(bar(read.problems, "preparing problems", read.n)):
        if writer is None:
            columns = {column: [row[column] for row in batch] for column in batch[0]}
            types = {column: read.types.get(column) or pyarrow.array(columns[column]).type for column in columns}
            schema = pyarrow.schema(types.items())
            writer = pyarrow.ipc.new_stream(sink, schema)
        writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema))
    if writer is not None:
        writer.close()


def rows_with(rows: Any, *columns: str) -> Iterator[Any]:
    """Yield rows, which are dictionaries with at least these columns."""
    if not hasattr(rows, "select_columns"):
        yield from rows
    else:
        for batch in rows.select_columns(list(columns)).iter(BATCH):
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(batch, values, strict=True))


def repeated(keys: Iterable[int]) -> Any:
    """Return whether each key occurs more than once, as an array: a counter of a million keys takes much memory.

    >>> repeated([5, 7, 5]).tolist()
    [True, False, True]
    """
    import numpy

    _, places, counts = numpy.unique(numpy.fromiter(keys, numpy.int64), return_inverse=True, return_counts=True)
    return counts[places] > 1


def remembered(rows: Any, name: str, compute: Callable[[], Any]) -> Any:
    """Return what ``compute`` returns, a JSON value that depends on ``rows`` and ``name`` alone.

    The value is kept next to the rows if they are in the cache.
    """
    files = getattr(rows, "cache_files", None)
    if not files:
        return compute()
    file = Path(files[0]["filename"]).with_name(f"{name}-{len(rows)}.json")
    # A missing file, or one that another process is writing.
    with suppress(Unreadable):
        return read_json(file)
    value = compute()
    # A full disk: the next run computes the value again.
    with suppress(OSError):
        write_json(file, value)
    return value
