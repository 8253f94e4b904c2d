r"""Find the problem and the gold answer in a row: by the common column names, or by the names of ``--columns``.

``outer.inner`` names a field inside a column, and ``one+other`` joins two columns with a line break. parts.py adds the
text before a question, and options.

>>> row = {"question": "What is 3 + 4?", "reward_model": {"ground_truth": "7"}, "id": 1}
>>> of_rows = layout(tuple(row), ACCEPTED)
>>> [of_rows.first(row, name) for name in ("problem", "answer", "level")]
[('question', 'What is 3 + 4?'), ('reward_model.ground_truth', '7'), ('', None)]

rows.py checks what a column contains.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError
from grpo_math.settings.data import columns_as_text
from grpo_math.system.reading import from_cell

ACCEPTED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "problem": ("problem", "question", "prompt", "query", "instruction+input"),
        "answer": (
            *("answer", "gold", "final_answer", "expected_answer", "ground_truth", "gold_answer", "target", "label"),
            *("reward_model.ground_truth", "correct_answer", "answerkey", "correct", "correct_option", "cop"),
            *("answer_index", "answer_idx", "solution"),
        ),
        "id": ("id", "unique_id"),
        "level": ("level",),
        "subject": ("subject",),
    }
)
# Arguments of a reward function that are not columns of the data, and names that training or loading adds to a row.
ARGUMENTS = ("prompts", "completions", "trainer_state", "log_extra", "log_metric", "environments")
# TRL reads a column image or images as pictures of the prompt, which a text model cannot take.
TRAINING_COLUMNS = (*(*ARGUMENTS, "prompt", "completion", "completion_ids", "answer_format", "image", "images"),)
# Words in the names of columns about a problem or an answer, which are neither of the two, nor a part of a problem.
ABOUT = frozenset(
    """
id uuid index idx nr no type kind format source url title topic lang language unit status len length count time date
level score difficulty rate model analysis explanation rationale process step point
""".split()  # noqa: SIM905
)
Columns = Mapping[str, tuple[str, ...]]  # the accepted columns of each field; the first one with a value is used


def accepted_columns(
    requested: str | Mapping[str, str] | None, source_columns: Mapping[str, str] = MappingProxyType({})
) -> Columns:
    """Return the columns of each field: the one in ``requested``, a text or a mapping, or else the data set's
    columns and the common names.

    >>> columns = accepted_columns("problem=query, answer=meta.gold", {"subject": "type"})
    >>> columns["problem"], columns["answer"], columns["subject"], columns["level"]
    (('query',), ('meta.gold',), ('type', 'subject'), ('level',))
    """
    named: dict[str, tuple[str, ...]] = {}
    text = columns_as_text(requested)
    for part in text.split(",") if text else ():
        field, _, column = (word.strip() for word in part.partition("="))
        if not column or field not in ACCEPTED or field in named:
            remedy = f"write problem=query,answer=target; the fields are {', '.join(ACCEPTED)}"
            raise ConfigError("columns", text, f"does not name a field and its one column in {part!r}", remedy)
        named[field] = (column,)
    return {
        **ACCEPTED,
        **{field: (column, *ACCEPTED.get(field, ())) for field, column in source_columns.items()},
        **named,
    }


class Layout(NamedTuple):
    """The meaning of the columns of rows that have the same columns."""

    aliases: Mapping[str, str]  # names in small letters with underscores -> columns that have other names
    present: Columns  # the accepted columns of each field that can have a value: few of them
    accepted: Columns

    def by_name(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the columns of a row by their names and aliases."""
        return {alias: row[name] for alias, name in self.aliases.items()} | dict(row) if self.aliases else row

    def first(self, row: Mapping[str, Any], field: str) -> tuple[str, Any]:
        """Return the name and the value of the field's first column with a value, else of the first column that is
        empty text; ("", None) without one. ``row`` has its columns `by_name`.

        >>> row = {"instruction": "Solve for x.", "input": "2x = 6"}
        >>> layout(tuple(row), ACCEPTED).first(row, "problem")[1]
        'Solve for x.\\n2x = 6'
        """
        empty = None
        for name in self.present.get(field, ()):
            value = _value(row, name)
            if isinstance(value, str) and not value.strip():
                empty = empty or (name, value)
            elif value is not None:
                return name, value
        return empty or ("", None)


def layout(columns: tuple[str, ...], accepted: Columns) -> Layout:
    """Return the layout of rows with these columns.

    >>> row = {"problem": "", "Question": "1 + 1?", "Gold Answer": "2"}
    >>> of_rows = layout(tuple(row), ACCEPTED)
    >>> of_rows.first(of_rows.by_name(row), "problem"), of_rows.first(of_rows.by_name(row), "answer")
    (('question', '1 + 1?'), ('gold_answer', '2'))
    """
    aliases = {normalized(name): name for name in columns if isinstance(name, str)}
    known = {*columns, *aliases}
    present = {
        field: tuple(name for name in names if not {name, name.partition(".")[0], *name.split("+")}.isdisjoint(known))
        for field, names in accepted.items()
    }
    return Layout(aliases if len(known) > len(columns) else {}, present, accepted)


def used(present: Iterable[str], columns: Columns) -> list[str]:
    """Return the columns that are read. Other columns may be gigabytes."""
    parts = {part.partition(".")[0] for names in columns.values() for name in names for part in name.split("+")}
    return [name for name in present if name in parts or normalized(name) in parts]


@lru_cache(maxsize=1000)
def normalized(name: str) -> str:
    return "_".join(name.lower().replace("-", " ").split())


def _value(row: Mapping[str, Any], name: str) -> Any:
    # Look up the whole name first, because the name of a column may itself contain "+" or ".".
    if name in row:
        return row[name]
    if "+" in name:
        values = [row.get(part) for part in name.split("+")]
        return "\n".join(str(value) for value in values if str(value or "").strip()) or None
    outer, _, inner = name.partition(".")
    value = from_cell(row.get(outer))
    return value.get(inner) if isinstance(value, Mapping) else None
