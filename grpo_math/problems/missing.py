"""Report a column that is missing, with the line to paste: which column is which, guessed by what the columns contain.

>>> from grpo_math.problems.columns import ACCEPTED
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
QUESTION = re.compile(r".*[?？؟]", re.DOTALL)

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
    order = [*texts]
    free = [name for name in order if name not in used(texts, columns)]
    length = {name: fmean(map(len, texts[name])) for name in free}
    problem, answer = (next(iter(used(texts, {"": columns[field]})), None) for field in ("problem", "answer"))
    guessed = {}
    # The problem asks a question or is the longest text. A solution may be longer, and marks its answer.
    likely = [n for n in free if length[n] >= SENTENCE and all(gold_answer(text) == text for text in texts[n])]
    if problem is None and likely:
        problem = guessed["problem"] = max(
            likely, key=lambda n: (_share(QUESTION.fullmatch, texts[n]) > 0.5, length[n])
        )
    others = [name for name in free if name != problem]
    # The gold answer has digits, does not count the rows, differs from row to row, follows the problem, and is short.
    if answer is None and problem is not None and others:
        guessed["answer"] = max(
            others,
            key=lambda n: (
                _share(re.compile(r"\d").search, texts[n]) > 0.5,
                texts[n] != [str(number) for number in range(1, len(texts[n]) + 1)],
                2 * len({*texts[n]}) > len(texts[n]),
                order.index(n) > order.index(problem),
                -length[n],
            ),
        )
    return guessed


def _share(test: Any, cells: Sequence[str]) -> float:
    return fmean(bool(test(cell)) for cell in cells)
