r"""Data sets -> rows {id, prompt, problem, answer, answer_format}, with level and subject if the data have them.

`prompt` is the model's input (prompts.py), `answer` is the gold answer alone, and `answer_format` names the format that
the prompt asks for. All rows of a data set have the same keys.

| name | data |
|---|---|
| gsm8k, math, aime2024, ... | a set of sources.py: in the data folder, or on the Hub |
| owner/name[:config][@revision] | any other set on the Hub |
| path/to/folder[:config] | a copy of a set in a local folder, as `hf download` or `save_to_disk` writes it |
| path/to/file.jsonl | one JSON object a line; or .json, .csv, .tsv, .parquet, each also compressed, or .xlsx |
| generated, generated:sums,products | problems made by generated.py |
| reasoning_gym:NAME | problems made by the package reasoning-gym (gym.py) |

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
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import file_digest, sha256
from heapq import nsmallest
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

from grpo_math.errors import ConfigError, DataError, as_config_error, first_line, require_choice
from grpo_math.grading.lexicon import DECIMAL
from grpo_math.problems import choices, generated, gym, missing, parts, stored
from grpo_math.problems import columns as which
from grpo_math.problems.problem import Problem
from grpo_math.problems.prompts import AS_IS, PROBLEM, Prompt, Template, as_template
from grpo_math.problems.rows import BadRow, Row, parse_row
from grpo_math.problems.sources import DEFAULT_SOURCE, HUB_ID, SOURCES, DatasetRef, Source, parse_ref, source_name
from grpo_math.problems.stored import Read, Stored
from grpo_math.system.encodings import uncompressed
from grpo_math.system.reading import home
from grpo_math.system.table_files import FAULT, is_table, read_table
from grpo_math.system.user_functions import is_user_function

logger = logging.getLogger(__name__)

DATA_DIR_VARIABLE = "GRPO_MATH_DATA"
SAME = {"test": "heldout", "heldout": "test"}
ACCEPTED = (*SOURCES, "generated", "reasoning_gym:NAME", "owner/name", "path/to/file.jsonl")
CHECKED = 200  # rows in which a column that is not read is noticed
NUMBER = re.compile(rf"-?{DECIMAL}")
DATA_CELL = re.compile(r"\W*\d|.*[?？؟]", re.DOTALL)  # a cell that is not the name of a column
LARGE = 2**23  # bytes of a data set whose problems are kept in the cache
Warn = Callable[[str], None]


class Data(NamedTuple):
    """A data set whose rows are not read yet. ``label`` begins each id, and ``file`` is the name for messages."""

    label: str
    file: str
    rows: Callable[[], Iterable[tuple[int, Any]]]  # the numbered rows, from the start
    content: Callable[[], str] = str  # a hash of the rows
    size: int = 0  # bytes, of a file maybe compressed
    source: Source = DEFAULT_SOURCE
    accepted: which.Columns = which.ACCEPTED


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
    template = as_template(template or (PROBLEM if system_prompt else "gsm8k"), system_prompt, answer_format)
    read, _ = _reader(dataset, split, template, columns, limit, seed, skip_bad_rows)
    _, problems, _ = read(logger.warning)
    return list(problems)


def problem_table(
    dataset: str,
    split: str,
    *,
    template: Template,
    columns: str | None,
    limit: int | None = None,
    seed: int = 0,
    skip_bad_rows: bool = False,
    warn: Warn = logger.warning,
) -> Any:
    """Return the rows of `load_problems` as a list, or as a `datasets.Dataset` in the cache if the data set is large.

    Prompts of the user's own function are made each time, because nothing shows that the function has changed.
    """
    read, data = _reader(dataset, split, template, columns, limit, seed, skip_bad_rows)
    if data.size < LARGE or is_user_function(template.name):
        _, problems, _ = read(warn)
        return list(problems)
    settings = (data.label, data.file, split, data.source, data.accepted, template, limit, seed, skip_bad_rows)
    return stored.table(dataset, (data.content(), settings), read, warn)


def _reader(
    dataset: str, split: str, template: Template, columns: Any, limit: int | None, seed: int, skip_bad_rows: bool
) -> tuple[Callable[[Warn], Read], Data]:
    """Return the function that reads the problems, and the data set."""
    if limit is not None and limit < 1:
        raise ConfigError("limit", limit, "is not a number of rows", "give 1 or more, or leave it out for all rows")
    data = open_rows(dataset, split, columns, limit, seed)

    def read(warn: Warn) -> Read:
        first: list[DataError] = []
        faults: Counter[tuple[str, str]] = Counter()

        def bad(raw: Any, error: DataError) -> None:
            faults[error.field, error.reason] += 1
            first[:] = first or [error]

        rows = good_rows(data, template.name == AS_IS, bad, warn)
        # A benchmark keeps repeated problems, because its authors count them.
        if data.source is not DEFAULT_SOURCE and "train" in data.source.splits:
            rows = Stored(_once(rows, data.file, warn))
        if first and (not (skip_bad_rows or data.source is not DEFAULT_SOURCE) or not rows):
            raise counted(first[0], faults, len(rows))
        if not rows:
            raise ConfigError("dataset", dataset, "has no rows", "check the file")
        for one in first:
            n = faults.total()
            warn(f"skipped {n:,} of {len(rows) + n:,} rows of {one.file}; line {one.line}: {one.field} {one.reason}")
        if limit is not None:
            # The rows with the smallest hashes: a larger limit contains the rows of a smaller one.
            digests = ((sha256(f"{seed} {row['id']}".encode()).digest(), row["id"]) for row in rows)
            drawn = {row_id for _, row_id in nsmallest(limit, digests)}
            rows = Stored(row for row in rows if row["id"] in drawn)
        return _with_prompts(rows, template, dataset, warn)

    return read, data


def counted(error: DataError, faults: Counter[tuple[str, str]], good: int) -> DataError:
    """Return an error with the number of rows that have the same one, if they are several."""
    n = faults[error.field, error.reason]
    reason = f"{error.reason} in {n:,} of {good + faults.total():,} rows" if n > 1 else error.reason
    return DataError(error.file, error.line, error.field, reason, error.remedy)


def good_rows(data: Data, as_is: bool, bad: Callable[[Any, DataError], None], warn: Warn) -> Stored:
    """Return the rows that can be used, in their order, and call ``bad`` with each other raw row and its error.

    ``as_is``: the model gets the row's own prompt. ``warn`` gets lines about gold answers that name options. Raises
    `ConfigError` if the rows lack a part of their problems.
    """
    has_options = has_lists = False

    def good() -> Iterator[Row]:
        nonlocal has_options, has_lists
        ids: set[str] = set()
        layout_of = lru_cache(maxsize=1000)(partial(which.layout, accepted=data.accepted))
        for line, raw in stored.bar(data.rows(), f"reading {data.file}", is_large=data.size >= LARGE):
            number = f"{data.label}/{line}"
            try:
                row = parse_row(raw, number, layout_of, data.source, as_is) | {"line": line}
            except BadRow as error:
                bad(raw, DataError(data.file, line, *error.args))
                continue
            # Results and completions are matched by id. Joined data sets often repeat ids.
            if row["id"] in ids:
                row["id"] = number
            ids.add(row["id"])
            has_options |= bool(row["options"])
            has_lists |= row["lists"] is not None
            yield row

    rows = Stored(good())
    # A column that --columns names is the user's choice.
    of_lists = warn if len(data.accepted["answer"]) > 1 else None
    if has_lists and (column := choices.options_column(rows, data.file, of_lists)):
        rows, has_options = Stored(choices.with_list(row, column) for row in rows), True
    if has_options:
        rows = Stored(choices.with_letters(rows, choices.numbering(rows, data.file, warn), data.file, warn))
    if rows and data.source is DEFAULT_SOURCE:
        _refuse_misread([*islice(rows, CHECKED)], data.file, data.accepted, as_is)
    return rows


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
    may_be_wrong = is_countdown and len(accepted["answer"]) > 1
    if may_be_wrong and all(row["answer"] in NUMBER.findall(row["problem"]) for row in rows):
        reason = f"has gold answers in the column {answer_key!r} that occur in their problems, as in a countdown"
        raise ConfigError("dataset", file, reason, f"give --columns answer=NAME, or answer={answer_key} to keep them")


# Finding the rows


def open_rows(
    dataset: str, split: str, columns: str | Mapping[str, str] | None, limit: int | None = None, seed: int = 0
) -> Data:
    """Return the rows of a data set. ``limit`` and ``seed`` select generated problems."""
    if dataset.partition(":")[0] == "generated":
        rows = _generated(dataset.partition(":")[2], split_name(split, generated.SPLITS), limit, seed)
        return Data("generated", dataset, lambda: enumerate(rows, 1))
    if dataset.startswith(gym.PREFIX):
        rows = gym.generate(dataset, split_name(split, generated.SPLITS), seed)
        return Data("reasoning_gym", dataset, lambda: enumerate(rows, 1))
    name = source_name(dataset)
    source = SOURCES.get(name or "", DEFAULT_SOURCE)
    accepted = which.accepted_columns(columns, source.columns)
    data = _built_in_set(dataset, name, split, accepted) if name else _user_set(dataset, split, accepted)
    return data._replace(source=source, accepted=accepted)


def _user_set(dataset: str, split: str, accepted: which.Columns) -> Data:
    """Open a file, a folder, or a set on the Hub that is not in sources.py."""
    address = parse_ref(dataset)
    path = home(address.path)
    if is_table(address.path):
        data = _file(path.name.partition(".")[0], dataset, path, split)
        is_text = uncompressed(path.name).endswith((".csv", ".tsv", ".xlsx"))
        rows = (row for _, row in data.rows() if FAULT not in row) if is_text else ()
        if table := [*islice(rows, missing.SEEN)]:
            header = [*table[0]]
            if not which.used(header, accepted) and any(map(DATA_CELL.match, header)):
                reason = f"has no line of column names: its first line is {', '.join(header)[:120]!r}"
                raise ConfigError("dataset", dataset, reason, "add one: problem,answer")
            missing.refuse_missing(dataset, table, accepted)
        return data
    if not path.is_dir() and not HUB_ID.fullmatch(address.path):
        if "/" in dataset or "\\" in dataset:
            raise ConfigError("dataset", dataset, "is not a file, a folder or an id on the Hub", "check the path")
        require_choice("dataset", dataset, ACCEPTED)
    remedy = "check the name and the connection, or give a local copy's folder"
    table = _hub_table(address, split, accepted, dataset, remedy)
    return _from_table(address.path.rstrip("/").rpartition("/")[2], f"{dataset} ({split})", table)


def _built_in_set(dataset: str, name: str, split: str, accepted: which.Columns) -> Data:
    """Open a set of sources.py: its file in the data folder, the data folder's copy of its repository, or the Hub."""
    source, ref = SOURCES[name], parse_ref(dataset)
    base, bracket, cut = split.partition("[")
    base = split_name(base, tuple(source.splits))
    label, file_name = f"{name}/{base}", source.files.get(base)
    folder = os.environ.get(DATA_DIR_VARIABLE)
    path = home(folder or ".") / (file_name or name)
    if folder and path.is_file() and not ref.config:
        return _file(label, str(path), path, split)
    copied = folder and path.is_dir() and not ref.revision
    config, hub_split = ref.config or source.config, source.splits[base] + bracket + cut
    address = DatasetRef(str(path), config, None) if copied else DatasetRef(source.hub, config, ref.revision)
    remedy = f"set {DATA_DIR_VARIABLE} to a folder that contains {file_name or name}, or name another data set"
    table = _hub_table(address, hub_split, accepted, name if copied else dataset, remedy, known=True)
    data = _from_table(label, str(path) if copied else f"{source.hub} ({hub_split})", table)
    if other := source.without.get(base):
        left_out = _hub_table(DatasetRef(SOURCES[other].hub), base, accepted, name, remedy, known=True)
        problems = {row["problem"] for row in left_out}
        # Left out here and not later, so that the numbers in the ids stay those of the published data.
        return data._replace(
            rows=lambda: ((number, row) for number, row in data.rows() if row["problem"] not in problems),
            content=lambda: data.content() + left_out._fingerprint,
        )
    return data


def _file(label: str, name: str, path: Path, split: str) -> Data:
    """Return the rows of a file, or a part of them such as ``train[200:]``."""
    of_list = split.partition("[")[0]

    def rows() -> Iterable[tuple[int, Any]]:
        if "[" not in split:
            return read_table(path, of_list)
        part = _part(split, sum(1 for _ in read_table(path, of_list)))
        return islice(read_table(path, of_list), part.start, part.stop)

    def content() -> str:
        with open(path, "rb") as file:
            return file_digest(file, "sha256").hexdigest()

    return Data(label, name, rows, content, path.stat().st_size if path.is_file() else 0)


def _from_table(label: str, name: str, table: Any) -> Data:
    return Data(label, name, lambda: enumerate(table, 1), lambda: table._fingerprint, table.data.nbytes)


def _part(split: str, rows: int) -> slice:
    """Return the part of a split that has this many rows, as in ``train[200:]``."""
    from datasets import ReadInstruction

    remedy = "write train[200:], train[:200] or train[:10%]"
    with as_config_error("split", split, "is not a valid part of a split", remedy):
        (part,) = ReadInstruction.from_spec(split).to_absolute({split.partition("[")[0]: rows})
    return slice(part.from_, part.to)


def _hub_table(
    address: DatasetRef, split: str, accepted: which.Columns, name: str, remedy: str, known: bool = False
) -> Any:
    """Return a split of a set on the Hub, or of a local folder of the same layout, as a `datasets.Dataset`.

    ``split`` may be cut, as in ``train[:500]``. ``known``: ``split`` is the data set's own name, and is not looked up.

    Raises `ConfigError` for ``name`` if the data set cannot be loaded, or has no such split, configuration or column.
    """
    import datasets

    folder = home(address.path)
    local = folder.is_dir()
    path = str(folder.absolute()) if local else address.path
    reason = f"is not in a local folder, and {path} cannot be loaded from the Hub"
    if local:
        reason, remedy = "is a folder that cannot be read", "check its files"
    # `datasets` and the Hub raise many kinds of errors. `datasets` wraps the reason in "An error occurred".
    with as_config_error("dataset", name, reason, remedy):
        if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
            table = _saved(datasets.load_from_disk(path), split)
        else:
            if not known:
                names = datasets.get_dataset_split_names(path, address.config, revision=address.revision)
                split = split_name(split, names)
            cache = {"cache_dir": _cache_folder(folder)} if local else {}
            table = datasets.load_dataset(path, address.config, split=split, revision=address.revision, **cache)
    if len(table):
        missing.refuse_missing(name, [table[number] for number in range(min(len(table), missing.SEEN))], accepted)
    # The other columns of a set on the Hub may be gigabytes. The options of an index may have any name.
    if known or not local:
        read = which.used(table.column_names, accepted)
        has_index = any(map(choices.is_index_column, read))
        kept = [
            name for name, feature in table.features.items() if has_index and not isinstance(feature, datasets.Value)
        ]
        names = [name for name in table.column_names if name in read or name in kept or parts.belongs(name)]
        table = table.select_columns(names)
    return table


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
    return generated.generate(split, min(limit or n, n), seed, names)


# Making the problems


def _once(rows: Iterable[Row], file: str, warn: Warn) -> Iterator[Row]:
    """Yield the first row of each problem."""
    seen: set[bytes] = set()
    n = 0
    for n, row in enumerate(rows, 1):  # noqa: B007
        key = sha256(row["problem"].encode()).digest()
        if key not in seen:
            seen.add(key)
            yield row
    if len(seen) < n:
        warn(f"left out {n - len(seen):,} of {n:,} rows of {file}: duplicate problems")


def _with_prompts(rows: Stored, template: Template, dataset: str, warn: Warn) -> Read:
    """Make the problems, each with the same columns in the same order: TRL's table needs them."""
    types = _column_types(rows, template, dataset, warn)
    others = [name for name in types if name != "prompt"]

    def problems() -> Iterator[Problem]:
        for row in rows:
            made = {
                "id": row["id"],
                "prompt": _prompt(row, template),
                "problem": row["problem"],
                "answer": row["answer"],
                "answer_format": template.answer_format,
                **{name: row["others"].get(name) for name in others},
            }
            yield cast(Problem, made)

    return len(rows), problems(), types


def _prompt(row: Row, template: Template) -> Prompt:
    return template.prompt(row["problem"], row.get("own_prompt"))


def _column_types(rows: Stored, template: Template, dataset: str, warn: Warn) -> dict[str, Any]:
    """Return the other columns that can be in TRL's table, with their types: a column has one type, and training does
    not use its name. The rows' own prompts are among them, because they are of any type too."""
    import pyarrow

    def values(some: Iterable[Row], name: str) -> list[Any]:
        return [_prompt(row, template) if name == "prompt" else row["others"].get(name) for row in some]

    # Types by batches: only a column whose batches differ is needed as a whole.
    types_by_name: dict[str, set[Any]] = {}
    reasons: dict[str, str] = {}
    order: dict[str, None] = {}
    for batch in stored.batches(rows):
        names = dict.fromkeys(name for row in batch for name in row["others"])
        order |= names
        # The trainer's own columns begin with grpo_math_ (rewards/inputs.py).
        taken = [name for name in names if name in which.TRAINING_COLUMNS or name.startswith("grpo_math_")]
        reasons |= dict.fromkeys(taken, "training uses this name itself")
        of_rows = ["prompt"] if template.name == AS_IS else []
        for name in [*(name for name in names if name not in taken), *of_rows]:
            types_by_name.setdefault(name, set()).add(_arrow_type(values(batch, name)))
    types = {}
    for name, kinds in types_by_name.items():
        kinds = kinds - {pyarrow.null()} or kinds
        try:
            types[name] = (
                kinds.pop() if len(kinds) == 1 and None not in kinds else pyarrow.array(values(rows, name)).type
            )
        except (pyarrow.ArrowException, OverflowError) as error:
            reasons[name] = first_line(error)
    for name in filter(reasons.get, order):
        warn(f"the column {name!r} of {dataset} is left out, no reward gets it: {reasons[name]}")
    return types


def _arrow_type(values: list[Any]) -> Any:
    """Return Arrow's type of some values; None if they have several types."""
    import pyarrow

    with suppress(pyarrow.ArrowException, OverflowError):
        return pyarrow.array(values).type
    return None
