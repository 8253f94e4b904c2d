r"""Data sets -> rows {id, prompt, problem, answer, answer_format}, with level and subject where the data have them.

`prompt` is what the model sees (prompts.py), `answer` is the gold answer alone, and `answer_format` names the format
that the prompt asks for. Every row of a load has the same keys.

| name | where it is |
|---|---|
| gsm8k, math, aime2024, ... | a set of sources.py: in the data folder, or on the Hub |
| owner/name[:config][@revision] | any other set on the Hub |
| path/to/folder[:config] | the same in a local folder, as `hf download` leaves it |
| path/to/file.jsonl | one JSON object a line |
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
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_math.errors import ConfigError, DataError, one_of
from grpo_math.problems import columns as which
from grpo_math.problems import generated, hub
from grpo_math.problems.columns import Columns
from grpo_math.problems.prompts import TEMPLATES, build_prompt
from grpo_math.problems.rows import EMPTY_IN_SOURCE, REMEDY, BadRow, Row, checked
from grpo_math.problems.sources import HUB_ID, SOURCES, Place, place_of, source_of
from grpo_math.reading import Unreadable, home, read_bytes

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

CUT = re.compile(r"(-?\d{1,15}%?)?:(-?\d{1,15}%?)?\]")
DATA_DIR_VARIABLE = "GRPO_MATH_DATA"
NAMES = (*SOURCES, "generated")
ACCEPTED = (*NAMES, "owner/name", "path/to/file.jsonl")


def load_problems(
    dataset: str,
    split: str = "train",
    *,
    template: str = "gsm8k",
    limit: int | None = None,
    seed: int = 0,
    skip_bad_rows: bool = False,
    data_dir: str | None = None,
    columns: str | None = None,
) -> list[Row]:
    """The rows of a data set (see the table above); of a .jsonl file, whatever the split, all rows.

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
        return _generated(levels, _split(generated.SPLITS, split, name), template, limit, seed)
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
    template: str = "gsm8k",
    data_dir: str | None = None,
    columns: str | None = None,
) -> tuple[list[Row], list[DataError]]:
    """All good rows of a data set or a file in their order, and one error for each bad row (see `load_problems`)."""
    one_of("template", template, tuple(TEMPLATES))
    name = source_of(dataset)
    wanted = which.chosen(which.read(columns), SOURCES[name].columns if name else {})
    label, file, raw_rows, exact = _open(dataset, name, split, wanted, data_dir)
    rows: list[Row] = []
    errors: list[DataError] = []
    line_of: dict[str, int] = {}
    for line, raw in raw_rows:
        try:
            row = checked(raw, f"{label}/{line}", wanted, name, exact)
            first = line_of.setdefault(row["id"], line)
            if first != line and exact:
                raise BadRow("id", f"{row['id'][:40]!r} is the id of line {first} too", REMEDY)
        except BadRow as bad:
            errors.append(DataError(file, line, *bad.args))
        else:
            rows.append(row if first == line else {**row, "id": f"{label}/{line}"})
    if name and SOURCES[name].repeats:
        rows = _once(rows, file)
    for row in rows:
        row["prompt"], row["answer_format"] = build_prompt(row["problem"], template), template
    return _same_keys(rows), errors


def to_dataset(rows: list[Row]) -> Dataset:
    """The rows as a `datasets.Dataset`, which is what TRL's trainer takes."""
    from datasets import Dataset

    return Dataset.from_list(rows)


# Finding the rows


def _open(
    dataset: str, name: str | None, split: str, wanted: Columns, data_dir: str | None
) -> tuple[str, str, Iterator[tuple[int, Any]], bool]:
    """What ids begin with, the name for messages, (line number, raw row) pairs, and whether this is the user's own file
    or a copy of it: bytes from a file, a mapping from the Hub or a folder."""
    if name is None:
        place = place_of(dataset)
        path = home(place.path)
        if place.path.endswith((".jsonl", ".json")) or (path.exists() and not path.is_dir()):
            remedy = "give a .jsonl file that can be read, or a set by its name, such as gsm8k"
            return path.stem, dataset, _lines(home(dataset), "dataset", remedy), True
        if not path.is_dir() and not HUB_ID.fullmatch(place.path):
            if "/" in dataset or "\\" in dataset:
                raise ConfigError("dataset", dataset, "is no file, no folder and no id on the Hub", "check the path")
            one_of("dataset", dataset, ACCEPTED)
        remedy = "check the name and the connection, or give a local copy's folder"
        found = hub.rows(place, split, wanted, dataset, remedy)
        return place.path.rstrip("/").rpartition("/")[2], f"{dataset} ({split})", found, False
    base, bracket, cut = split.partition("[")
    base = _split(tuple(SOURCES[name].splits), base, name)
    label, own = f"{name}/{base}", SOURCES[name].files.get(base)
    folder = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    if folder and own and not place_of(dataset).config:
        path = home(folder) / own
        if path.is_file() or data_dir:
            rows = list(_lines(path, "data_dir", f"give the folder that holds {own}"))
            return label, str(path), iter(rows[_part(split, len(rows))]), True
    return label, *_published(dataset, name, base, bracket + cut, wanted, folder), False


def _published(
    dataset: str, name: str, split: str, cut: str, wanted: Columns, folder: str | None
) -> tuple[str, Iterator[tuple[int, Any]]]:
    """A known set by the data folder's copy of its repository, or from the Hub."""
    source, said = SOURCES[name], place_of(dataset)
    config = said.config or source.config
    at = f"a folder that holds {source.files.get(split, name + '/')}"
    remedy = f"set {DATA_DIR_VARIABLE} to {at}, or pass --dataset generated"
    theirs = source.splits[split] + cut
    copy = home(folder) / name if folder else None
    if copy and copy.is_dir() and not said.revision and not source.files:
        return str(copy), hub.rows(Place(str(copy), config, None), theirs, wanted, name, remedy, known=True)
    found = hub.rows(Place(source.hub, config, said.revision), theirs, wanted, dataset, remedy, known=True)
    if name == "math" and split == "test":
        math500 = Place(SOURCES["math500"].hub, None, None)
        benchmark = {row["problem"] for _, row in hub.rows(math500, "test", wanted, name, remedy, known=True)}
        found = ((number, row) for number, row in found if row["problem"] not in benchmark)
    return f"{source.hub} ({theirs})", found


def _split(available: tuple[str, ...], split: str, name: str) -> str:
    alias = {"heldout": "test", "test": "heldout"}.get(split, split)
    if split not in available and alias in available:
        return alias
    if split == "train" and available == ("test",):
        logger.warning("%s has a test split only, which is used: report no figures on it after training", name)
        return "test"
    one_of("split", split, available)
    return split


def _part(split: str, rows: int) -> slice:
    """What ``[200:]`` or ``[:10%]`` after the name of a split leaves of so many rows.

    >>> _part("train[:25%]", 8), _part("train[-3:]", 8), _part("train", 8)
    (slice(None, 2, None), slice(-3, None, None), slice(None, None, None))
    """
    if "[" not in split:
        return slice(None)
    found = CUT.fullmatch(split.partition("[")[2])
    if found is None:
        remedy = "write train[200:], train[:200] or train[:10%]"
        raise ConfigError("split", split, "is not cut as a split can be", remedy)

    def row(end: str | None) -> int | None:
        return None if end is None else round(rows * int(end[:-1]) / 100) if end.endswith("%") else int(end)

    return slice(row(found[1]), row(found[2]))


def _lines(path: Path, field: str, remedy: str) -> Iterator[tuple[int, bytes]]:
    try:
        lines = read_bytes(path).split(b"\n")
    except Unreadable as error:
        raise ConfigError(field, str(path), str(error), remedy) from None
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _once(rows: list[Row], file: str) -> list[Row]:
    """Each problem once, the first time that it stands there."""
    kept = list({row["problem"]: row for row in reversed(rows)}.values())[::-1]
    if len(kept) < len(rows):
        logger.warning(f"left out {len(rows) - len(kept):,} of {len(rows):,} rows of {file}: the problem occurs before")
    return kept


def _generated(levels: str, split: str, template: str, limit: int | None, seed: int) -> list[Row]:
    one_of("template", template, tuple(TEMPLATES))
    names = [name.strip() for name in levels.split(",")] if levels else ["sums", "differences"]
    for name in names:
        one_of("level", name, tuple(generated.LEVELS))
    numbers = [generated.LEVELS[name] for name in names]
    n = limit or len(numbers) * min(generated.count(number, split) for number in numbers)
    made = generated.generate(split, n, seed, numbers)
    given = [{"prompt": build_prompt(problem.problem, template), "answer_format": template} for problem in made]
    return _same_keys([{**problem._asdict(), **row} for problem, row in zip(made, given, strict=True)])


# What comes out


def _same_keys(rows: list[Row]) -> list[Row]:
    """Every row with the same keys in the same order; levels that are partly text become text."""
    keys = ["id", "prompt", "problem", "answer", "answer_format"]
    keys += [key for key in ("level", "subject", "tolerance") if any(row.get(key) is not None for row in rows)]
    rows = [{key: row.get(key) for key in keys} for row in rows]
    if any(isinstance(row.get("level"), str) for row in rows):
        for row in rows:
            row["level"] = None if row["level"] is None else str(row["level"])
    return rows


def _skipped(errors: list[DataError], total: int) -> str:
    """One line: how many rows were left out, and why."""
    lines: dict[str, list[int]] = {}
    for error in errors:
        lines.setdefault(f"{error.field} {error.reason}", []).append(error.line)
    reasons = [f"{reason} ({_listed(numbers)})" for reason, numbers in lines.items()]
    if len(reasons) > 5:
        reasons[5:] = [f"and {len(reasons) - 5} more reasons"]
    return f"skipped {len(errors):,} of {total:,} rows of {errors[0].file}: {'; '.join(reasons)}"


def _listed(numbers: list[int]) -> str:
    more = f" and {len(numbers) - 8:,} more" if len(numbers) > 8 else ""
    return f"line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:8]))}{more}"
