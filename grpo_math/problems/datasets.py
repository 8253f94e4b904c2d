r"""Data sets -> rows {id, prompt, problem, answer, answer_format}, with level and subject where the data have them.

`prompt` is what the model sees (prompts.py), `answer` is the gold answer alone, and `answer_format` names the format
that the prompt asks for. Every row of a load has the same keys.

| name | where it is |
|---|---|
| gsm8k, math, aime2024, ... | a set of sources.py: in the data folder, or on the Hub |
| owner/name[:config][@revision] | any other set on the Hub |
| path/to/folder[:config] | the same in a local folder, as `hf download` leaves it |
| path/to/file.jsonl | one JSON object a line; or .json (a list), .csv, .tsv, .parquet, each also as .gz |
| generated, generated:word,sums | generated.py makes them |

The gold is taken out of the answer column: what its last ``\boxed{}`` holds, or what follows its last ``####``
(without thousands separators), or all of it. columns.py says which column is which.

The data folder is ``data_dir``, or the environment variable GRPO_MATH_DATA: it holds the files of gsm8k, math and
math500 (`Source.files`), and of any other set a folder with the set's name. The test split of math never holds a
problem of math500, from either source: 4,500 rows (one of which, in the published data, is a training problem too).

>>> rows = load_problems("generated", "heldout", limit=2)
>>> sorted(rows[0]), rows[0]["problem"], rows[0]["answer"]
(['answer', 'answer_format', 'id', 'level', 'problem', 'prompt'], 'What is 4 + 13?', '17')

Does not shuffle, tokenize or cut prompts: TRL does.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_math.errors import ConfigError, DataError, first_line, one_of
from grpo_math.problems import columns as which
from grpo_math.problems import generated, hub
from grpo_math.problems.columns import Columns
from grpo_math.problems.prompts import Template, as_template
from grpo_math.problems.rows import EMPTY_IN_SOURCE, REMEDY, BadRow, Row, checked
from grpo_math.problems.sources import HUB_ID, OWN, SOURCES, Place, place_of, source_of
from grpo_math.reading import home, is_table, read_table

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

DATA_DIR_VARIABLE = "GRPO_MATH_DATA"
NAMES = (*SOURCES, "generated")
ACCEPTED = (*NAMES, "owner/name", "path/to/file.jsonl")


def load_problems(
    dataset: str,
    split: str = "train",
    *,
    template: str | Template = "gsm8k",
    limit: int | None = None,
    seed: int = 0,
    skip_bad_rows: bool = False,
    data_dir: str | None = None,
    columns: str | None = None,
) -> list[Row]:
    """The rows of a data set (see the table above); of a file, whatever the split, all rows.

    ``template`` is a name, a text with ``{problem}``, or ``module:function`` (docs/data.md).
    ``columns`` says which column is which where its name does not: ``problem=query,answer=meta.gold``.

    ``test`` and ``heldout`` mean the same. ``limit`` rows are drawn by ``seed`` and stay in the order of the file; for
    generated problems ``seed`` says which are made, and without a limit there are as many as the levels evenly give.
    The first bad row raises `DataError`; with ``skip_bad_rows`` they are left out, and one line is logged that counts
    them. The two rows of MATH whose published answer is empty are always left out in this way.

    >>> [row["problem"] for row in load_problems("generated:products", limit=2, seed=1)]
    ['What is 2 * 12?', 'What is 9 * 5?']
    """
    if limit is not None and limit < 1:
        raise ConfigError("limit", limit, "is not a number of rows", "give 1 or more, or leave it out for all rows")
    name, _, levels = dataset.partition(":")
    if name == "generated":
        if columns:
            raise ConfigError("columns", columns, "would be ignored: generated problems have none", "leave it out")
        return _generated(levels, hub.split_of(split, generated.SPLITS), template, limit, seed)
    rows, errors = read_rows(dataset, split, template=template, data_dir=data_dir, columns=columns)
    for error in errors:
        if not skip_bad_rows and error.reason != EMPTY_IN_SOURCE:
            raise error
    if not rows:
        why = f" ({errors[0].field} {errors[0].reason}, line {errors[0].line})" if errors else ""
        raise ConfigError("dataset", dataset, f"has no row that can be used{why}", "check the file")
    if errors:
        logger.warning(_skipped(errors, len(rows) + len(errors)))
    if limit is not None:
        drawn = sorted(rows, key=lambda row: sha256(f"{seed} {row['id']}".encode()).digest())[:limit]
        kept = {row["id"] for row in drawn}
        rows = [row for row in rows if row["id"] in kept]
    return rows


def read_rows(
    dataset: str,
    split: str = "train",
    *,
    template: str | Template = "gsm8k",
    data_dir: str | None = None,
    columns: str | None = None,
) -> tuple[list[Row], list[DataError]]:
    """All good rows of a data set or a file in their order, and one error for each bad row (see `load_problems`)."""
    template = as_template(template)
    name = source_of(dataset)
    source = SOURCES[name] if name else OWN
    wanted = which.chosen(which.read(columns), source.columns)
    label, file, raw_rows, exact = _open(dataset, name, split, wanted, data_dir)
    rows: list[Row] = []
    errors: list[DataError] = []
    line_of: dict[str, int] = {}
    for line, raw in raw_rows:
        try:
            row = checked(raw, f"{label}/{line}", wanted, source, exact)
            if not name and exact:
                which.refuse_made(row, dataset)
            elif not name:  # a column on the Hub cannot be renamed
                row = {key: value for key, value in row.items() if key not in which.MADE}
            first = line_of.setdefault(row["id"], line)
            if first != line and exact:
                raise BadRow("id", f"{row['id'][:40]!r} is the id of line {first} too", REMEDY)
        except BadRow as bad:
            errors.append(DataError(file, line, *bad.args))
        else:
            rows.append(row if first == line else {**row, "id": f"{label}/{line}"})
    if source.repeats:
        rows = _once(rows, file)
    for row in rows:
        row["prompt"] = template.prompt(row["problem"], row.pop("own_prompt"))
        row["answer_format"] = template.answer_format
    return _same_keys(rows, dataset), errors


def to_dataset(rows: list[Row]) -> Dataset:
    """The rows as a `datasets.Dataset`, which is what TRL's trainer takes."""
    from datasets import Dataset

    return Dataset.from_list(rows)


# Finding the rows


class _Opened(NamedTuple):
    """``label``: what ids begin with; ``file``: the name for messages; ``rows``: a line of JSON as bytes, or a mapping,
    with its number; ``exact``: these rows are the user's own file, or a copy of it."""

    label: str
    file: str
    rows: Iterable[tuple[int, Any]]
    exact: bool


def _open(dataset: str, name: str | None, split: str, wanted: Columns, data_dir: str | None) -> _Opened:
    if name is not None:
        return _known(dataset, name, split, wanted, data_dir)
    place = place_of(dataset)
    path = home(place.path)
    if is_table(place.path) or (path.exists() and not path.is_dir()):
        return _Opened(Path(path.name.removesuffix(".gz")).stem, dataset, read_table(home(dataset)), True)
    if not path.is_dir() and not HUB_ID.fullmatch(place.path):
        if "/" in dataset or "\\" in dataset:
            raise ConfigError("dataset", dataset, "is no file, no folder and no id on the Hub", "check the path")
        one_of("dataset", dataset, ACCEPTED)
    remedy = "check the name and the connection, or give a local copy's folder"
    found = hub.rows(place, split, wanted, dataset, remedy)
    return _Opened(place.path.rstrip("/").rpartition("/")[2], f"{dataset} ({split})", found, False)


def _known(dataset: str, name: str, split: str, wanted: Columns, data_dir: str | None) -> _Opened:
    """Open a set of sources.py: its file in the data folder, the data folder's copy of its repository, or the Hub."""
    source, said = SOURCES[name], place_of(dataset)
    base, bracket, cut = split.partition("[")
    if base == "train" and set(source.splits) == {"test"}:
        logger.warning("%s has a test split only, which is used: report no figures on it after training", name)
        base = "test"
    base = hub.split_of(base, tuple(source.splits))
    label, own = f"{name}/{base}", source.files.get(base)
    folder = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    path = home(folder or ".") / (own or name)
    if folder and own and not said.config and (path.is_file() or data_dir):
        rows = list(read_table(path))
        return _Opened(label, str(path), rows[_part(split, len(rows))], True)
    copied = folder and path.is_dir() and not said.revision
    config, theirs = said.config or source.config, source.splits[base] + bracket + cut
    place = Place(str(path), config, None) if copied else Place(source.hub, config, said.revision)
    remedy = f"set {DATA_DIR_VARIABLE} to a folder that holds {own or name}, or pass --dataset generated"
    found = hub.rows(place, theirs, wanted, name if copied else dataset, remedy, known=True)
    if other := source.without.get(base):
        left_out = {row["problem"] for _, row in hub.rows(Place(SOURCES[other].hub), base, wanted, name, remedy, True)}
        found = ((number, row) for number, row in found if row["problem"] not in left_out)
    return _Opened(label, str(path) if copied else f"{source.hub} ({theirs})", found, False)


def _part(split: str, rows: int) -> slice:
    """Return what ``[200:]`` or ``[:10%]`` after the name of a split leaves of so many rows.

    >>> _part("train[:25%]", 8), _part("train[-3:]", 8), _part("train", 8)
    (slice(0, 2, None), slice(5, 8, None), slice(None, None, None))
    """
    if "[" not in split:
        return slice(None)
    from datasets import ReadInstruction

    try:
        (part,) = ReadInstruction.from_spec(split).to_absolute({split.partition("[")[0]: rows})
    except (ValueError, AssertionError) as error:
        remedy = "write train[200:], train[:200] or train[:10%]"
        raise ConfigError("split", split, f"is not cut as a split can be ({error})", remedy) from None
    return slice(part.from_, part.to)


def _once(rows: list[Row], file: str) -> list[Row]:
    """Each problem once, the first time that it stands there."""
    kept = list({row["problem"]: row for row in reversed(rows)}.values())[::-1]
    if len(kept) < len(rows):
        logger.warning(f"left out {len(rows) - len(kept):,} of {len(rows):,} rows of {file}: the problem occurs before")
    return kept


def _generated(levels: str, split: str, template: str | Template, limit: int | None, seed: int) -> list[Row]:
    template = as_template(template)
    names = [name.strip() for name in levels.split(",")] if levels else ["sums", "differences"]
    for name in names:
        one_of("level", name, tuple(generated.LEVELS))
    numbers = [generated.LEVELS[name] for name in names]
    n = limit or len(numbers) * min(generated.count(number, split) for number in numbers)
    made = generated.generate(split, n, seed, numbers)
    given = [{"prompt": template.prompt(row.problem), "answer_format": template.answer_format} for row in made]
    return _same_keys([{**problem._asdict(), **row} for problem, row in zip(made, given, strict=True)])


# What comes out


def _same_keys(rows: list[Row], dataset: str = "generated") -> list[Row]:
    """Every row with the same keys in the same order; levels that are partly text become text."""
    keys = ["id", "prompt", "problem", "answer", "answer_format"]
    parts = ("level", "subject", "tolerance")
    own = dict.fromkeys(key for row in rows for key in row if key not in (*keys, *parts))
    keys += [key for key in parts if any(row.get(key) is not None for row in rows)]
    keys += [key for key in own if _fits_a_table(key, [row.get(key) for row in rows], dataset)]
    rows = [{key: row.get(key) for key in keys} for row in rows]
    if any(isinstance(row.get("level"), str) for row in rows):
        for row in rows:
            row["level"] = None if row["level"] is None else str(row["level"])
    return rows


def _fits_a_table(column: str, values: list[Any], dataset: str) -> bool:
    """Return whether the values are of one type, as the table that TRL trains on has them; a warning if not."""
    import pyarrow

    try:
        pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError) as error:
        logger.warning(f"the column {column!r} of {dataset} is left out, no reward gets it: {first_line(error)}")
        return False
    return True


def _skipped(errors: list[DataError], total: int) -> str:
    """Return one line: how many rows were left out, and why."""
    lines: dict[str, list[str]] = {}
    for error in errors:
        lines.setdefault(f"{error.field} {error.reason}", []).append(str(error.line))
    reasons = [f"{reason} ({_listed(at)})" for reason, at in [*lines.items()][:5]]
    return f"skipped {len(errors):,} of {total:,} rows of {errors[0].file}: {'; '.join(reasons)}"


def _listed(lines: list[str]) -> str:
    more = f" and {len(lines) - 8:,} more" if len(lines) > 8 else ""
    return f"line{'s' if len(lines) > 1 else ''} {', '.join(lines[:8])}{more}"
