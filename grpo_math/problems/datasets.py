r"""Data sets -> rows {id, prompt, problem, answer, answer_format}, with level and subject where the data have them.

`prompt` is what the model sees (prompts.py), `answer` is the gold answer alone, and `answer_format` names the format
that the prompt asks for. Every row of a load has the same keys.

| name | local file under the data folder | Hub | gold |
|---|---|---|---|
| gsm8k | gsm8k/{train,test}.jsonl | openai/gsm8k, main | the last ``####``, without thousands separators |
| math | math/{train,test_outside_math500}.jsonl | DigitalLearningGmbH/MATH-lighteval | the last ``\boxed{}`` |
| math500 | math500/test.jsonl | HuggingFaceH4/MATH-500 | the last ``\boxed{}`` |
| generated, generated:word,sums | none: generated.py makes them | none | computed |
| path/to/file.jsonl | itself | none | answer, gold or solution; a box or ``####`` in it is opened |

The data folder is ``data_dir``, or the environment variable GRPO_MATH_DATA. The test split of math never holds a
problem of math500, from either source: 4,500 rows (one of which, in the published data, is a training problem too).

>>> rows = load_problems("generated", "heldout", limit=2)
>>> sorted(rows[0]), rows[0]["problem"], rows[0]["answer"]
(['answer', 'answer_format', 'id', 'level', 'problem', 'prompt'], 'What is 4 + 13?', '17')

Does not shuffle, tokenize or cut prompts: TRL does.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_math.errors import ConfigError, DataError, first_line, one_of
from grpo_math.grading.extract import extract_gold
from grpo_math.grading.formats import FORMATS
from grpo_math.problems import generated
from grpo_math.problems.prompts import TEMPLATES, build_prompt

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

DATA_DIR_VARIABLE = "GRPO_MATH_DATA"
Row = dict[str, Any]


class Source(NamedTuple):
    """Where a named data set is: its splits' files under the data folder, and its id and configuration on the Hub."""

    files: dict[str, str]
    hub: str
    config: str | None = None


SOURCES = {
    "gsm8k": Source({"train": "gsm8k/train.jsonl", "test": "gsm8k/test.jsonl"}, "openai/gsm8k", "main"),
    "math": Source(
        {"train": "math/train.jsonl", "test": "math/test_outside_math500.jsonl"}, "DigitalLearningGmbH/MATH-lighteval"
    ),
    "math500": Source({"test": "math500/test.jsonl"}, "HuggingFaceH4/MATH-500"),
}
NAMES = (*SOURCES, "generated")

# MATH's own gaps, by the start of the problem: two boxes are empty; one solution boxes everything but its answer, and
# one box holds half of a formula.
EMPTY_IN_MATH = (
    "For any integer $n>1$, the number of prime numbers greater than $n!+1$",
    "You are given a sequence of $58$ terms; each term has the form $P+n$",
)
WRONG_BOX_IN_MATH = {
    "Let $\\boxed{N}$ mean the number of whole number divisors": "6",
    "What is the largest value of $x$, if $\\frac{x}{5} + \\frac{1}{5x} = \\frac{1}{2}$?": "2",
}
EMPTY_IN_SOURCE = "is empty in the published data"

THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
LEVEL = re.compile(r"(?:Level )?(\d{1,9})")
SURROGATE = re.compile("[\ud800-\udfff]")
PROBLEM_KEYS = ("problem", "question", "prompt")
ANSWER_KEYS = ("answer", "gold", "solution")
ID_KEYS = ("id", "unique_id")
REMEDY = "correct the row, or pass --skip_bad_rows"


class BadRow(Exception):
    """The field, the reason and the remedy of a `DataError`; `read_rows` knows the file and the line."""


def load_problems(
    dataset: str,
    split: str = "train",
    *,
    template: str = "gsm8k",
    limit: int | None = None,
    seed: int = 0,
    skip_bad_rows: bool = False,
    data_dir: str | None = None,
) -> list[Row]:
    """The rows of a data set (see the table above); of a .jsonl file, whatever the split, all rows.

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
        return _generated(levels, _split(name, split), template, limit, seed)
    rows, errors = read_rows(dataset, split, template=template, data_dir=data_dir)
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
    dataset: str, split: str = "train", *, template: str = "gsm8k", data_dir: str | None = None
) -> tuple[list[Row], list[DataError]]:
    """All good rows of a data set or a file in their order, and one error for each bad row (see `load_problems`)."""
    one_of("template", template, tuple(TEMPLATES))
    name = next((name for name, source in SOURCES.items() if source.hub == dataset), dataset)
    if name in SOURCES:
        split = _split(name, split)
    file, raw_rows = _open(name, split, data_dir)
    label = f"{name}/{split}" if name in SOURCES else Path(name).stem
    rows: list[Row] = []
    errors: list[DataError] = []
    line_of: dict[str, int] = {}
    for line, raw in raw_rows:
        try:
            row = _row(raw, name, f"{label}/{line}")
            first = line_of.setdefault(row["id"], line)
            _check(first == line, "id", f"{row['id'][:40]!r} is the id of line {first} too")
        except BadRow as bad:
            errors.append(DataError(file, line, *bad.args))
        else:
            rows.append(row)
    for row in rows:
        row["prompt"], row["answer_format"] = build_prompt(row["problem"], template), template
    return _same_keys(rows), errors


def to_dataset(rows: list[Row]) -> Dataset:
    """The rows as a `datasets.Dataset`, which is what TRL's trainer takes."""
    from datasets import Dataset

    return Dataset.from_list(rows)


def gsm8k_gold(solution: str) -> str | None:
    r"""The number after the last ``####`` of a GSM8K solution, without thousands separators; None where there is none.

    >>> gsm8k_gold("5 * 425 = <<5*425=2125>>2,125\n#### 2,125"), gsm8k_gold("no marker")
    ('2125', None)
    """
    found = FORMATS["gsm8k"].marker.findall(solution)
    return THOUSANDS.sub("", found[-1].strip()) if found else None


# Finding the rows


def _open(name: str, split: str, data_dir: str | None) -> tuple[str, Iterator[tuple[int, Any]]]:
    """The name for messages, and (line number, raw row) pairs: bytes from a file, a dict from the Hub."""
    source = SOURCES.get(name)
    if source is None:
        if not name.endswith((".jsonl", ".json")) and not re.search(r"[/\\]", name):
            one_of("dataset", name, (*NAMES, "path/to/file.jsonl"))
        remedy = f"give a .jsonl file that can be read, or {', '.join(NAMES)}"
        return name, _lines(Path(name).expanduser(), "dataset", remedy)
    folder = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    if folder:
        path = Path(folder).expanduser() / source.files[split]
        if path.is_file() or data_dir:
            return str(path), _lines(path, "data_dir", f"give the folder that holds {source.files[split]}")
    return f"{source.hub} ({split})", _hub_rows(name, source, split)


def _split(name: str, split: str) -> str:
    available = tuple(SOURCES[name].files) if name in SOURCES else generated.SPLITS
    alias = {"heldout": "test", "test": "heldout"}.get(split, split)
    if split not in available and alias in available:
        return alias
    if split == "train" and available == ("test",):
        logger.warning("%s has a test split only, which is used: report no figures on it after training", name)
        return "test"
    one_of("split", split, available)
    return split


def _lines(path: Path, field: str, remedy: str) -> Iterator[tuple[int, bytes]]:
    if path.is_fifo():
        raise ConfigError(field, str(path), "is a pipe, which can be read only once", remedy)
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise ConfigError(field, str(path), f"cannot be read ({error.strerror})", remedy) from None
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _hub_rows(name: str, source: Source, split: str) -> Iterator[tuple[int, Row]]:
    rows = list(enumerate(_from_hub(name, source, split), 1))
    if name == "math":
        benchmark = {row["problem"] for row in _from_hub(name, SOURCES["math500"], "test")} if split == "test" else ()
        rows = [(n, {**row, "subject": row.get("type")}) for n, row in rows if row["problem"] not in benchmark]
    return iter(rows)


def _from_hub(name: str, source: Source, split: str) -> list[Row]:
    import datasets
    import huggingface_hub

    owner, _, repository = source.hub.partition("/")
    cached = Path(datasets.config.HF_DATASETS_CACHE) / f"{owner}___{repository.lower()}"
    try:
        # One short call first: load_dataset would try for half a minute, and print each try.
        if not cached.is_dir():
            huggingface_hub.HfApi().dataset_info(source.hub, timeout=10)
        return list(datasets.load_dataset(source.hub, source.config, split=split))
    except Exception as error:  # whatever stands between here and the Hub, the remedy is the same
        raise ConfigError(
            "dataset",
            name,
            f"is not in a local folder, and {source.hub} cannot be had from the Hub "
            f"({type(error).__name__}: {first_line(error)[:120]})",
            f"set {DATA_DIR_VARIABLE} to a folder that holds {source.files[split]}, or pass --dataset generated",
        ) from None


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


# Checking one row


def _row(raw: bytes | Row, name: str, default_id: str) -> Row:
    """{id, problem, answer} and the level and subject that the row has; a bad row raises `BadRow`."""
    fields = raw if isinstance(raw, dict) else _parse(raw)
    problem_key, problem = _first(fields, PROBLEM_KEYS)
    _check(isinstance(problem, str), problem_key, _kind(problem, "text"))
    _check_text(problem, problem_key)

    answer_key, answer = _first(fields, ANSWER_KEYS)
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
    _check(is_number or isinstance(answer, str), answer_key, _kind(answer, "text or a number"))
    _check(not is_number or math.isfinite(answer), answer_key, "is not finite")
    answer = str(answer)
    gap = EMPTY_IN_SOURCE if name == "math" and problem.startswith(EMPTY_IN_MATH) else ""
    _check(bool(answer.strip()), answer_key, gap or "is empty")
    _check_text(answer, answer_key)
    gold = _gold(answer, problem, name)
    lacks = f"has no {FORMATS['gsm8k'].tags[0]} line" if name == "gsm8k" else "holds no gold answer"
    _check(bool(gold), answer_key, gap or lacks)

    id_key, identity = _first(fields, ID_KEYS)
    identity = default_id if identity is None else identity
    _check(isinstance(identity, str | int) and not isinstance(identity, bool), id_key, _kind(identity, "text"))
    row = {"id": str(identity), "problem": problem.strip(), "answer": gold}
    _check_text(row["id"], id_key)
    if "level" in fields:
        row["level"] = _level(fields["level"])
    if "subject" in fields:
        row["subject"] = subject = fields["subject"]
        _check(subject is None or isinstance(subject, str), "subject", _kind(subject, "text"))
    return row


def _gold(answer: str, problem: str, name: str) -> str | None:
    if name == "gsm8k" or (FORMATS["gsm8k"].marker.search(answer) and not FORMATS["boxed"].marker.search(answer)):
        return gsm8k_gold(answer)
    if FORMATS["boxed"].marker.search(answer):
        known = (gold for start, gold in WRONG_BOX_IN_MATH.items() if name == "math" and problem.startswith(start))
        return next(known, None) or extract_gold(answer).text
    return answer.strip()


def _parse(line: bytes) -> Row:
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRow("row", f"is not UTF-8 (byte {error.start})", REMEDY) from None
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise BadRow("row", f"is not JSON ({reason})", f"write one object a line, {REMEDY}") from None
    _check(isinstance(fields, dict), "row", _kind(fields, "an object"))
    return fields


def _first(fields: Row, keys: tuple[str, ...]) -> tuple[str, Any]:
    """The first of the keys that the row has, and its value; the first key and None where it has none."""
    return next(((key, fields[key]) for key in keys if fields.get(key) is not None), (keys[0], None))


def _check(good: bool, field: str, reason: str) -> None:
    if not good:
        raise BadRow(field, reason, REMEDY)


def _check_text(text: str, field: str) -> None:
    _check(bool(text.strip()), field, "is empty")
    _check(not SURROGATE.search(text), field, "holds half of a surrogate pair, which no tokenizer takes")


def _kind(value: object, wanted: str) -> str:
    if value is None:
        return "is missing"
    kinds = {dict: "an object", list: "a list", bool: "true or false", str: "text", int: "a number", float: "a number"}
    return f"is {kinds.get(type(value), type(value).__name__)}, not {wanted}"


def _level(level: Any) -> int | str | None:
    if isinstance(level, str):
        number = LEVEL.fullmatch(level)
        return int(number[1]) if number else None if level == "Level ?" else level
    whole = level is None or (isinstance(level, int) and not isinstance(level, bool))
    _check(whole, "level", _kind(level, "a whole number or text"))
    return level


def _same_keys(rows: list[Row]) -> list[Row]:
    """Every row with the same keys in the same order; levels that are partly text become text."""
    keys = ["id", "prompt", "problem", "answer", "answer_format"]
    keys += [key for key in ("level", "subject") if any(row.get(key) is not None for row in rows)]
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
