r"""Data sets -> rows {id, prompt, problem, answer, answer_format}, with level and subject if the data have them.

`prompt` is the model's input (prompts.py), `answer` is the gold answer alone, and `answer_format` names the format that
the prompt asks for. All rows of a data set have the same keys.

| name | data |
|---|---|
| gsm8k, math, aime2024, ... | a set of sources.py: in the data folder, or on the Hub |
| owner/name[:config][@revision] | any other set on the Hub |
| path/to/folder[:config] | a copy of a set in a local folder, as `hf download` or `save_to_disk` writes it |
| path/to/file.jsonl | one JSON object a line; or .json, .csv, .tsv, .parquet, each also compressed; one split |
| generated, generated:sums,products | problems made by generated.py |

The gold answer comes from the answer column, where the grader finds it (`gold_answer`): in a box, after ``####``
or in an answer tag, else the whole column. columns.py finds the columns.

The environment variable GRPO_MATH_DATA names the data folder. It contains the files of gsm8k, math and math500
(`Source.files`), and a folder with the set's name for each other set. The test split of math never contains a problem
of math500: it has 4,500 rows (one of them, in the published data, is also a training problem).

>>> rows = load_problems("generated", "heldout", limit=2)
>>> sorted(rows[0]), rows[0]["problem"], rows[0]["answer"]
(['answer', 'answer_format', 'id', 'level', 'problem', 'prompt'], 'What is 4 + 13?', '17')

Does not run code of a repository, and does not shuffle, tokenize or cut prompts: TRL does.
"""

import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from grpo_math.errors import ConfigError, DataError, UserError, first_line, require_choice
from grpo_math.problems import columns as which
from grpo_math.problems import generated, missing, parts
from grpo_math.problems.problem import Problem
from grpo_math.problems.prompts import AS_IS, PROBLEM, Template, as_template
from grpo_math.problems.rows import BadRow, Row, checked
from grpo_math.problems.sources import HUB_ID, OWN, SOURCES, Place, Source, parse_place, source_name
from grpo_math.reading import home, is_table, read_table, uncompressed

logger = logging.getLogger(__name__)

DATA_DIR_VARIABLE = "GRPO_MATH_DATA"
SAME = {"test": "heldout", "heldout": "test"}
ACCEPTED = (*SOURCES, "generated", "owner/name", "path/to/file.jsonl")
CHECKED = 200  # rows in which a column that is not read is noticed
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
OF_A_ROW = re.compile(r"\W*\d|.*[?？؟]", re.DOTALL)  # a cell that is not the name of a column
Opened = tuple[str, str, Iterable[tuple[int, Any]]]  # the start of each id, the name for messages, the numbered rows


def load_problems(
    dataset: str,
    split: str = "train",
    *,
    template: str | Template | None = None,
    system_prompt: str | None = None,
    answer_format: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    skip_bad_rows: bool = False,
    columns: str | Mapping[str, str] | None = None,
) -> list[Problem]:
    """Return the rows of a data set (see the table above). A split may be cut: ``train[200:]``, ``train[:10%]``.

    ``template`` is a name, a text with ``{problem}``, or ``module:function`` (docs/data.md); ``gsm8k`` by default, and
    the problem alone with a ``system_prompt``. Without ``answer_format`` the prompt decides which format is requested.
    ``columns`` names columns without a common name: ``problem=query,answer=meta.gold``, or a mapping.

    ``test`` and ``heldout`` mean the same. A file has one split, under any name. ``seed`` draws ``limit`` rows, which
    stay in the order of the file. For generated problems ``seed`` selects the problems, evenly from the levels.

    The first bad row raises `DataError`. With ``skip_bad_rows``, and in the built-in data sets, bad rows are left out,
    and one log line counts them.

    >>> [row["problem"] for row in load_problems("generated:products", limit=2, seed=1)]
    ['What is 2 * 12?', 'What is 9 * 5?']
    """
    if limit is not None and limit < 1:
        raise ConfigError("limit", limit, "is not a number of rows", "give 1 or more, or leave it out for all rows")
    template = as_template(template or (PROBLEM if system_prompt else "gsm8k"), system_prompt, answer_format)
    errors: list[DataError] = []
    name, _, levels = dataset.partition(":")
    if name == "generated":
        rows = _generated(levels, split_name(split, generated.SPLITS), limit, seed)
    else:
        source = SOURCES.get(source_name(dataset) or "", OWN)
        accepted = which.chosen(columns, source.columns)
        opened = open_rows(dataset, split, accepted)
        rows, errors = parse_rows(*opened, accepted, source, template.name == AS_IS)
        # A benchmark keeps all rows, as its authors count them.
        if source is not OWN and "train" in source.splits:
            rows = _once(rows, opened[1])
    skips = skip_bad_rows or source_name(dataset) is not None
    if errors and (not skips or not rows):
        raise errors[0]
    if not rows:
        raise ConfigError("dataset", dataset, "has no rows", "check the file")
    if errors:
        one, counted = errors[0], f"{len(errors):,} of {len(rows) + len(errors):,}"
        logger.warning(f"skipped {counted} rows of {one.file}; line {one.line}: {one.field} {one.reason}")
    # The rows with the smallest hashes: a larger limit contains the rows of a smaller one.
    drawn = sorted(rows, key=lambda row: sha256(f"{seed} {row['id']}".encode()).digest())[:limit]
    ids = {row["id"] for row in drawn}
    return _with_prompts([row for row in rows if row["id"] in ids], template, dataset)


def parse_rows(
    label: str,
    file: str,
    numbered: Iterable[tuple[int, Any]],
    accepted: which.Columns,
    source: Source,
    as_is: bool = False,
) -> tuple[list[Row], list[DataError]]:
    """Return all good rows of a data set in their order, and one error for each bad row.

    ``as_is``: the model gets the row's own prompt. Raises `ConfigError` if the rows lack a part of their problems.
    """
    rows: list[Row] = []
    errors: list[DataError] = []
    ids: set[str] = set()
    for line, raw in numbered:
        number = f"{label}/{line}"
        try:
            row = {**checked(raw, number, accepted, source, as_is), "line": line}
        except BadRow as bad:
            errors.append(DataError(file, line, *bad.args))
            continue
        # Results and completions are matched by id. Joined data sets often repeat ids.
        if row["id"] in ids:
            row["id"] = number
        ids.add(row["id"])
        rows.append(row)
    parts.write_options(rows)
    if rows and source is OWN:
        _refuse_misread(rows[:CHECKED], file, accepted, as_is)
    return rows, errors


def _refuse_misread(rows: list[Row], file: str, accepted: which.Columns, as_is: bool) -> None:
    """Raise `ConfigError` for a part of the problem that is not read, and for a gold answer that the problem gives."""
    problem_key, answer_key = rows[0]["read"]
    read = which.used(rows[0]["others"], accepted)
    # A column that --columns names is the user's choice.
    for name in rows[0]["others"] if len(accepted["problem"]) > 1 and not as_is else ():
        if name not in read and 2 * sum(parts.unread(name, row) for row in rows) > len(rows):
            reason = f"has a column {name!r} that looks like a part of the problem, and is not read"
            remedy = f"give --columns problem={name}+{problem_key}, or --columns problem={problem_key} without it"
            raise ConfigError("dataset", file, reason, remedy)
    # The number that a countdown is to reach.
    is_countdown = answer_key == "target" or not {"nums", "numbers"}.isdisjoint(rows[0]["others"])
    if is_countdown and len(accepted["answer"]) > 1 and all(map(_shows_gold, rows)):
        reason = f"has gold answers in the column {answer_key!r} that stand in their problems, as in a countdown"
        raise ConfigError("dataset", file, reason, f"give --columns answer=NAME, or answer={answer_key} to keep them")


def _shows_gold(row: Row) -> bool:
    return row["answer"] in NUMBER.findall(row["problem"])


# Finding the rows


def open_rows(dataset: str, split: str, accepted: which.Columns) -> Opened:
    if name := source_name(dataset):
        return _known(dataset, name, split, accepted)
    address = parse_place(dataset)
    path = home(address.path)
    if is_table(address.path):
        table = _table(path, split)
        is_text = uncompressed(path.name).endswith((".csv", ".tsv"))
        if is_text and table:
            header = [*table[0][1]]
            if not which.used(header, accepted) and any(map(OF_A_ROW.match, header)):
                reason = f"has no line of column names: its first line is {', '.join(header)[:120]!r}"
                raise ConfigError("dataset", dataset, reason, "add one: problem,answer")
            missing.refuse_missing(dataset, [row for _, row in table], accepted)
        return path.name.partition(".")[0], dataset, table
    if not path.is_dir() and not HUB_ID.fullmatch(address.path):
        if "/" in dataset or "\\" in dataset:
            raise ConfigError("dataset", dataset, "is not a file, a folder or an id on the Hub", "check the path")
        require_choice("dataset", dataset, ACCEPTED)
    remedy = "check the name and the connection, or give a local copy's folder"
    rows = _hub_rows(address, split, accepted, dataset, remedy)
    return address.path.rstrip("/").rpartition("/")[2], f"{dataset} ({split})", rows


def _known(dataset: str, name: str, split: str, accepted: which.Columns) -> Opened:
    """Open a set of sources.py: its file in the data folder, the data folder's copy of its repository, or the Hub."""
    source, stated = SOURCES[name], parse_place(dataset)
    base, bracket, cut = split.partition("[")
    base = split_name(base, tuple(source.splits))
    label, file_name = f"{name}/{base}", source.files.get(base)
    folder = os.environ.get(DATA_DIR_VARIABLE)
    path = home(folder or ".") / (file_name or name)
    if folder and path.is_file() and not stated.config:
        return label, str(path), _table(path, split)
    copied = folder and path.is_dir() and not stated.revision
    config, theirs = stated.config or source.config, source.splits[base] + bracket + cut
    address = Place(str(path), config, None) if copied else Place(source.hub, config, stated.revision)
    remedy = f"set {DATA_DIR_VARIABLE} to a folder that holds {file_name or name}, or pass --dataset generated"
    rows = _hub_rows(address, theirs, accepted, name if copied else dataset, remedy, known=True)
    if other := source.without.get(base):
        left_out = {
            row["problem"] for _, row in _hub_rows(Place(SOURCES[other].hub), base, accepted, name, remedy, True)
        }
        # Here and not later, so that the numbers in the ids stay those of the published data.
        rows = ((number, row) for number, row in rows if row["problem"] not in left_out)
    return label, str(path) if copied else f"{source.hub} ({theirs})", rows


def _table(path: Path, split: str) -> list[tuple[int, Any]]:
    """Return the numbered rows of a file, or a part of them such as ``train[200:]``."""
    rows = list(read_table(path, split.partition("[")[0]))
    return rows[_part(split, len(rows))] if "[" in split else rows


def _part(split: str, rows: int) -> slice:
    """Return the part of a split that has this many rows, as in ``train[200:]``."""
    from datasets import ReadInstruction

    try:
        (part,) = ReadInstruction.from_spec(split).to_absolute({split.partition("[")[0]: rows})
    except (ValueError, AssertionError) as error:
        remedy = "write train[200:], train[:200] or train[:10%]"
        raise ConfigError("split", split, f"is not cut as a split can be ({error})", remedy) from None
    return slice(part.from_, part.to)


def _hub_rows(
    address: Place, split: str, accepted: which.Columns, name: str, remedy: str, known: bool = False
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Return the rows of a split of a set on the Hub, or of a local folder of the same layout, numbered from 1.

    ``split`` may be cut, as in ``train[:500]``. ``known``: ``split`` is the data set's own name, and is not looked up.

    Raises `ConfigError` for ``name`` if the data set cannot be loaded, or has no such split, configuration or column.
    """
    import datasets

    folder = home(address.path)
    local = folder.is_dir()
    path = str(folder) if local else address.path
    try:
        if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
            table = _saved(datasets.load_from_disk(path), split)
        else:
            if not known:
                names = datasets.get_dataset_split_names(path, address.config, revision=address.revision)
                split = split_name(split, names)
            cache = {"cache_dir": _cache_folder(folder)} if local else {}
            table = datasets.load_dataset(path, address.config, split=split, revision=address.revision, **cache)
    except UserError:
        raise
    except Exception as error:
        # `datasets` and the Hub raise many kinds of errors. `datasets` wraps the reason in "An error occurred".
        while isinstance(error.__cause__, Exception):
            error = error.__cause__
        message = f"{type(error).__name__}: {first_line(error)}"
        reason = f"is not in a local folder, and {path} cannot be had from the Hub ({message})"
        if local:
            reason, remedy = f"is a folder that cannot be read ({message})", "check its files"
        raise ConfigError("dataset", name, reason, remedy) from None
    if len(table):
        missing.refuse_missing(name, [table[number] for number in range(min(len(table), missing.SEEN))], accepted)
    # The other columns of a set on the Hub may be gigabytes.
    if known or not local:
        read = which.used(table.column_names, accepted)
        table = table.select_columns([name for name in table.column_names if name in read or parts.belongs(name)])
    return enumerate(table, 1)


def _saved(saved: Any, split: str) -> Any:
    """Return the rows of a split in what `save_to_disk` wrote: a set with splits, or one split."""
    tables = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
    split = split_name(split, tables)
    table = tables[split.partition("[")[0]]
    return table.select(range(len(table))[_part(split, len(table))]) if "[" in split else table


def _cache_folder(folder: Path) -> str:
    """Return a cache folder for these versions of the files."""
    import datasets

    # If README.md lists the files, `datasets` returns the cached rows of a file that has changed since.
    stats = sorted((str(path), path.stat().st_mtime_ns) for path in folder.resolve().rglob("*") if path.is_file())
    return str(Path(datasets.config.HF_DATASETS_CACHE) / f"grpo_math-{sha256(repr(stats).encode()).hexdigest()[:12]}")


def split_name(split: str, names: Collection[str]) -> str:
    """Return the data set's name for a split. Raises `ConfigError`, which lists its names, for an unknown split.

    >>> split_name("test[:5]", ["train", "heldout"])
    'heldout[:5]'
    """
    base, bracket, cut = split.partition("[")
    if base not in names and SAME.get(base) in names:
        base = SAME[base]
    require_choice("split", base, tuple(names))
    return base + bracket + cut


def _generated(levels: str, split: str, limit: int | None, seed: int) -> list[Row]:
    names = list(dict.fromkeys(name.strip() for name in (levels or "sums,differences").split(",")))
    for name in names:
        require_choice("level", name, tuple(generated.LEVELS))
    n = len(names) * min(len(generated.problems(name, split)) for name in names)
    rows = generated.generate(split, min(limit or n, n), seed, names)
    return [{**row, "others": {"level": row["level"]}} for row in rows]


# Making the problems


def _once(rows: list[Row], file: str) -> list[Row]:
    """Return the first row of each problem."""
    # A dict keeps the last value of a key, so the rows are reversed.
    first = {row["problem"]: number for number, row in reversed([*enumerate(rows)])}
    kept = [rows[number] for number in sorted(first.values())]
    if len(kept) < len(rows):
        logger.warning(f"left out {len(rows) - len(kept):,} of {len(rows):,} rows of {file}: duplicate problems")
    return kept


def _with_prompts(rows: list[Row], template: Template, dataset: str) -> list[Problem]:
    """Make the problems, each with the same columns in the same order."""
    # TRL's table needs the same columns in each row.
    names = dict.fromkeys(name for row in rows for name in row["others"])
    kept = [name for name in names if _fits_a_table(name, [row["others"].get(name) for row in rows], dataset)]
    problems = []
    for row in rows:
        made = {
            "id": row["id"],
            "prompt": template.prompt(row["problem"], row.get("own_prompt")),
            "problem": row["problem"],
            "answer": row["answer"],
            "answer_format": template.answer_format,
            **{name: row["others"].get(name) for name in kept},
        }
        problems.append(cast(Problem, made))
    return problems


def _fits_a_table(column: str, values: list[Any], dataset: str) -> bool:
    """Return True if a column can be in TRL's table: it has one type, and training does not use its name."""
    import pyarrow

    # The trainer's own columns begin with grpo_math_ (rewards/inputs.py).
    reason = "training uses this name itself" if column in which.MADE or column.startswith("grpo_math_") else ""
    try:
        pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError) as error:
        reason = first_line(error)
    if reason:
        logger.warning(f"the column {column!r} of {dataset} is left out, no reward gets it: {reason}")
    return not reason
