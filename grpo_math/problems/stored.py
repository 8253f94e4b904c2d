r"""Rows on disk: those of the first pass for the passes after it, and the problems of a large set for all later runs.

>>> rows = Stored({"id": str(number)} for number in range(IN_MEMORY + BATCH + 1))
>>> len(rows), sum(1 for _ in rows), next(iter(rows))
(21001, 21001, {'id': '0'})

The problems of a large set are an Arrow file in the cache of `datasets`. It is named after everything that the problems
depend on: the content of the data, the settings, and the code of this package. The first process that needs the
problems writes the file, and the other processes of the machine wait for it. They map it into their memory.
"""

import gc
import json
import logging
import os
import pickle  # noqa: TID251 -- of an unnamed file, which no other process can open
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from itertools import chain, islice, pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from grpo_math.errors import first_line
from grpo_math.problems.problem import Problem
from grpo_math.run import files
from grpo_math.run.bar import Bar

logger = logging.getLogger(__name__)

BATCH = 1000  # rows that are written and read at once
METADATA = "huggingface"  # the metadata of an Arrow file that `datasets` keeps
IN_MEMORY = 20_000  # the first rows, which are not written to a temporary file


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


# The number of problems, the problems, which are made as they are needed, and Arrow's types of some of their columns.
Read = tuple[int, Iterator[Problem], Mapping[str, Any]]


def table(
    name: str,
    depends_on: object,
    read: Callable[[Callable[[str], None]], Read],
    warn: Callable[[str], None] = logger.warning,
) -> Any:
    """Return the problems that ``read`` returns as a `datasets.Dataset`, from the cache if they are there.

    ``name`` is the data set's, for messages. ``depends_on`` is everything that changes the problems, except for code.
    ``read`` gets a function that takes warnings. ``warn`` gets them each time, also if nothing is read.
    """
    import datasets
    from filelock import FileLock

    key = sha256(repr((_code(), datasets.__version__, depends_on)).encode()).hexdigest()[:32]
    file = Path(datasets.config.HF_DATASETS_CACHE) / "grpo_math" / f"{key}.arrow"
    line = f"the problems of {name} are in {file}, as an earlier process prepared them"
    try:
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{file}.lock"):
                # Another process may have written the file while this one waited.
                if not file.exists():
                    with files.written_whole(file) as scratch, scratch.open("wb") as sink:
                        _write_rows(sink, read)
                    line = f"the problems of {name} are kept in {file}, and used again"
        rows = datasets.Dataset.from_file(str(file))
    # NotImplementedError: a file system without locks.
    except (OSError, NotImplementedError) as error:
        import pyarrow

        reason = getattr(error, "strerror", None) or first_line(error)
        line = f"the problems of {name} are prepared in memory: {file.parent} cannot be written ({reason})"
        memory = pyarrow.BufferOutputStream()
        _write_rows(memory, read)
        rows = datasets.Dataset.from_buffer(memory.getvalue())
    if not _is_other_process():
        print(line, file=sys.stderr)
    for note in json.loads(rows.data.schema.metadata[METADATA.encode()])["notes"]:
        warn(note)
    return rows


@cache
def _code() -> str:
    """Return a hash of this package: another version may read the same data in another way."""
    # The words of the grader are in a JSON file, and the built-in data sets in a YAML file.
    package = Path(__file__).parents[1]
    files = sorted(file for file in package.rglob("*") if file.suffix in (".py", ".json", ".yaml"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _write_rows(sink: Any, read: Callable[[Callable[[str], None]], Read]) -> None:
    """Write problems to a file of Arrow's stream format. The warnings are its metadata."""
    import pyarrow

    # Python searches for unused objects after every few new rows. Until the end, it leaves out all that exists now:
    # the search of the modules would take half of the time.
    gc.freeze()
    try:
        notes: list[str] = []
        n, problems, types = read(notes.append)
        first = next(problems)
        columns = {column: types.get(column) or pyarrow.array([value]).type for column, value in first.items()}
        schema = pyarrow.schema(columns.items(), {METADATA: json.dumps({"notes": notes})})
        with pyarrow.ipc.new_stream(sink, schema) as writer:
            for batch in batches(bar(chain([first], problems), "preparing problems", n)):
                writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema))
    finally:
        gc.unfreeze()


def rows_with(rows: Any, *columns: str) -> Iterator[Any]:
    """Yield rows, which are dictionaries with at least these columns."""
    if not hasattr(rows, "select_columns"):
        yield from rows
    else:
        for batch in rows.select_columns(list(columns)).with_format("arrow").iter(BATCH):
            yield from batch.to_pylist()


def without(rows: Any, positions: Sequence[int]) -> Any:
    """Return rows, a list or a `datasets.Dataset`, without those at some positions in order.

    >>> without(["a", "b", "c", "d"], [1, 3])
    ['a', 'c']
    """
    # The parts between the positions. A table that selects single rows is read slowly.
    parts = [range(start + 1, end) for start, end in pairwise([-1, *positions, len(rows)])]
    if isinstance(rows, list):
        return [rows[position] for part in parts for position in part]
    from datasets import concatenate_datasets

    return concatenate_datasets([rows.select(part) for part in parts if part])


def repeated(keys: Iterable[int]) -> Any:
    """Return whether each key occurs more than once, as an array: a counter of a million keys takes much memory.

    >>> repeated([5, 7, 5]).tolist()
    [True, False, True]
    """
    import numpy

    _, places, counts = numpy.unique(numpy.fromiter(keys, numpy.int64), return_inverse=True, return_counts=True)
    return counts[places] > 1


def cached_with_rows(rows: Any, name: str, compute: Callable[[], Any]) -> Any:
    """Return what ``compute`` returns, a JSON value that depends on ``rows`` and ``name`` alone.

    The value is kept next to the rows if they are in the cache.
    """
    files_of_rows = getattr(rows, "cache_files", None)
    if not files_of_rows:
        return compute()
    return files.remembered(Path(files_of_rows[0]["filename"]).with_suffix(f".{name}-{len(rows)}.json"), compute)
