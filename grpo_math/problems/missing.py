"""Report a column that is missing, with the line to paste: which column is which, guessed by what the columns contain.

>>> row = {"Nr": 1, "Frage": "Wie viel sind 40 + 53 Euro?", "Loesung": "93 Euro"}
>>> column_remedy([row], "problem", ACCEPTED)
'its columns are Nr, Frage, Loesung; give --columns problem=Frage,answer=Loesung'

columns.py finds the columns with a common name.
"""

import re
from collections.abc import Mapping, Sequence
from numbers import Number
from statistics import fmean
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.grading.where import gold_answer
from grpo_math.problems.columns import Columns, as_text, used

SEEN = 50  # rows that are read for a guess
SENTENCE = 10  # characters of a problem
ASKS = re.compile(r".*[?？؟]", re.DOTALL)

Texts = Mapping[str, list[str]]  # column -> what its cells contain


def refuse_missing(dataset: str, rows: Sequence[Mapping[str, Any]], columns: Columns) -> None:
    """Raise `ConfigError` if no column of these rows is the problem's, or none is the gold answer's."""
    for field in ("problem", "answer"):
        if not used(rows[0], {field: columns[field]}):
            raise ConfigError("dataset", dataset, f"has no column for the {field}", column_remedy(rows, field, columns))


def column_remedy(rows: Sequence[Mapping[str, Any]], field: str, columns: Columns) -> str:
    """Return the remedy for rows that lack a field: the line to paste, or the accepted names without a guess."""
    present, guessed = ", ".join(rows[0])[:120], _guess(_texts(rows[:SEEN]), columns)
    if field in guessed:
        return f"its columns are {present}; give --columns {as_text(guessed)}"
    return f"its columns are {present}; accepted are {', '.join(columns[field])}, or give --columns {field}=NAME"


def _texts(rows: Sequence[Mapping[str, Any]]) -> Texts:
    texts: dict[str, list[str]] = {}
    for row in rows:
        outer = [(name, cell) for name, cell in row.items() if isinstance(cell, Mapping)]
        inner = {f"{name}.{key}": value for name, cell in outer for key, value in cell.items()}
        for name, cell in {**row, **inner}.items():
            if isinstance(cell, str | Number) and str(cell).strip():
                texts.setdefault(name, []).append(str(cell).strip())
    return texts


def _guess(texts: Texts, columns: Columns) -> dict[str, str]:
    """Return the likely columns of the fields without an accepted name."""
    free = [name for name in texts if name not in used(texts, columns)]
    problem, answer = (next(iter(used(texts, {"": columns[field]})), None) for field in ("problem", "answer"))
    guessed = {}
    # The problem asks a question or is the longest text. A solution may be longer, and marks its answer.
    if problem is None:
        plain = {name: all(gold_answer(text) == text for text in texts[name]) for name in free}
        likely = [name for name in free if plain[name] and _length(texts[name]) >= SENTENCE]
        if not likely:
            return {}
        problem = guessed["problem"] = max(
            likely, key=lambda name: (_most(ASKS.fullmatch, texts[name]), _length(texts[name]))
        )
    others = [name for name in free if name != problem]
    if answer is None and others:
        later = [*texts][[*texts].index(problem) :]
        # The gold answer has digits, does not count the rows, differs from row to row, and is short.
        guessed["answer"] = max(
            others,
            key=lambda name: (
                _most(re.compile(r"\d").search, texts[name]),
                not _counts(texts[name]),
                2 * len({*texts[name]}) > len(texts[name]),
                name in later,
                -_length(texts[name]),
            ),
        )
    return guessed


def _length(cells: Sequence[str]) -> float:
    return fmean(map(len, cells))


def _most(test: Any, cells: Sequence[str]) -> bool:
    return 2 * sum(map(bool, map(test, cells))) > len(cells)


def _counts(cells: Sequence[str]) -> bool:
    """Return True for the numbers of the rows, as in 1, 2, 3."""
    return all(cell.isdecimal() for cell in cells) and [int(cell) - int(cells[0]) for cell in cells] == [
        *range(len(cells))
    ]
