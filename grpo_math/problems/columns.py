r"""Which column of a row holds the problem, which the gold answer: by the common spellings, or as ``--columns`` says.

A column is named as it is, ``outer.inner`` names a field inside of it, and ``one+other`` both, a line apart.

>>> row = {"Question": "What is 3 + 4?", "reward_model": {"ground_truth": "7"}, "id": 1}
>>> [first(row, name, ACCEPTED[name]) for name in ("problem", "answer", "level")]
[('Question', 'What is 3 + 4?'), ('reward_model.ground_truth', '7'), ('level', None)]

Does not check what a column holds: datasets.py does.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from grpo_math.errors import ConfigError

ACCEPTED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "problem": ("problem", "question", "prompt", "query", "input", "instruction"),
        "answer": (
            *("answer", "gold", "final_answer", "expected_answer", "ground_truth", "gold_answer", "target", "label"),
            *("reward_model.ground_truth", "solution"),
        ),
        "id": ("id", "unique_id"),
        "level": ("level",),
        "subject": ("subject",),
    }
)
NEEDED = ("problem", "answer")
# Arguments of a reward function that are not columns of the data, and what else training or loading adds to a row.
ARGUMENTS = ("prompts", "completions", "grade", "trainer_state", "log_extra", "log_metric", "environments")
MADE = (
    *(*ARGUMENTS, "prompt", "completion", "completion_ids", "max_completion_length", "grade_timeout"),
    *("answer_format", "tolerance", "image", "images"),
)
Columns = Mapping[str, tuple[str, ...]]  # the columns of each field that are looked at, the first one first


def read(said: str | None) -> dict[str, str]:
    """``problem=query,answer=target`` -> {"problem": "query", "answer": "target"}.

    >>> read("problem=query, answer=meta.gold"), read(None)
    ({'problem': 'query', 'answer': 'meta.gold'}, {})
    """
    found = {}
    for part in said.split(",") if said else ():
        field, equals, column = (word.strip() for word in part.partition("="))
        if not (equals and column):
            raise ConfigError("columns", said, f"does not say which column {part!r} is", "write problem=query,...")
        if field not in ACCEPTED:
            raise ConfigError("columns", said, f"names {field!r}", f"the fields are {', '.join(ACCEPTED)}")
        found[field] = column
    return found


def chosen(said: Mapping[str, str], own: Mapping[str, str] = MappingProxyType({})) -> Columns:
    """The columns of each field: the one that is said, or the set's own one and the common spellings."""
    known = {field: (column, *ACCEPTED.get(field, ())) for field, column in own.items()}
    return {**ACCEPTED, **known, **{field: (column,) for field, column in said.items()}}


def first(row: Mapping[str, Any], field: str, names: Sequence[str]) -> tuple[str, Any]:
    """The first of the columns that holds something in a row, as it is spelt there; the field and None without one."""
    for name in names:
        value = row.get(name) if name in row else _value(row, name)
        if value is not None:
            return _spelt(row, name), value
    return (names[0] if len(names) == 1 else field), None


def refuse_missing(found: Iterable[str], columns: Columns, dataset: str) -> None:
    """`ConfigError` unless a data set with these columns can have a problem and an answer."""
    present = dict.fromkeys(found)
    for field, names in columns.items():
        if any(all(_spelt(present, _outer(part)) in present for part in name.split("+")) for name in names):
            continue
        had = ", ".join(present) or "none"
        if len(names) == 1 and names != ACCEPTED.get(field) and field in ACCEPTED:
            raise ConfigError("columns", f"{field}={names[0]}", f"is no column of {dataset}", f"it has {had}")
        if field in NEEDED:
            remedy = f"it has {had}; accepted are {', '.join(names)}: say which, as in --columns {field}=NAME"
            raise ConfigError("dataset", dataset, f"has no column for the {field}", remedy)


def refuse_made(found: Iterable[str], dataset: str, made: Collection[str] = MADE) -> None:
    """`ConfigError` for a column with a name of ``made``.

    >>> refuse_made(["source", "grade"], "mine.jsonl")
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: dataset='mine.jsonl' has a column 'grade', a name that training uses itself: ...
    """
    if taken := [name for name in found if name in made]:
        reason = f"has a column {taken[0]!r}, a name that training uses itself"
        raise ConfigError("dataset", dataset, reason, f"rename it, to my_{taken[0]} for example")


def used(found: Sequence[str], columns: Columns) -> list[str]:
    """Those of a data set's columns that are looked at: the others may hold gigabytes."""
    present = dict.fromkeys(found)
    asked = {_spelt(present, _outer(part)) for names in columns.values() for name in names for part in name.split("+")}
    return [name for name in found if name in asked]


def remedy_of(row: Mapping[str, Any], field: str, names: Sequence[str]) -> str:
    """What would be right where a row lacks a field."""
    had = ", ".join(map(str, row)) or "none"
    return f"its columns are {had[:120]}; accepted are {', '.join(names)}, or say --columns {field}=NAME"


def _outer(name: str) -> str:
    return name.partition(".")[0]


def _spelt(row: Mapping[str, Any], name: str) -> str:
    """A name as the row spells it: some sets write Problem and Answer."""
    return name if name in row else next((key for key in row if key.lower() == name.lower()), name)


def _value(row: Mapping[str, Any], name: str) -> Any:
    if "+" in name:
        parts = [value for part in name.split("+") if (value := first(row, part, (part,))[1]) not in (None, "")]
        return "\n".join(map(str, parts)) if parts else None
    outer, _, inner = name.partition(".")
    value = row.get(_spelt(row, outer))
    return value if not inner else value.get(inner) if isinstance(value, Mapping) else None
