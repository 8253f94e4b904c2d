"""A JSONL file of (gold, prediction) rows -> the verdicts that `grpo-math grade` prints.

Does not print.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError, DataError, cut, one_of
from grpo_math.grading import Verdict, grade_batch
from grpo_math.grading.formats import FORMATS
from grpo_math.grading.house import HOUSE, House
from grpo_math.reading import Unreadable, from_json, read_bytes

LONGEST = 86_400  # seconds for an answer


def grade_file(
    path: str | Path,
    *,
    answer_format: str | None = None,
    timeout: float = 5.0,
    progress: Callable[[int], None] | None = None,
    house: House = HOUSE,
) -> dict[str, Any]:
    """``{"rows": N, "verdicts": {verdict: count}, "results": [{"verdict", "answer", "seconds"}]}``, in row order.

    A row holds ``gold`` and ``prediction``, and may name its own ``format``. A bad row is a `DataError`.
    """
    if not 0 < timeout <= LONGEST:
        raise ConfigError("timeout", timeout, "is out of range", f"give seconds above 0, and {LONGEST} at most")
    if answer_format is not None:
        one_of("format", answer_format, tuple(FORMATS))
    golds, predictions, formats = [], [], []
    for line, row in _rows(path):
        golds.append(_text(path, line, row, "gold"))
        predictions.append(_text(path, line, row, "prediction"))
        name = row.get("format", answer_format)
        if name is not None and (not isinstance(name, str) or name not in FORMATS):
            raise DataError(
                path, line, "format", f"is {cut(name)}", f"use one of {', '.join(FORMATS)}, or leave it out"
            )
        formats.append(name)
    grades = grade_batch(golds, predictions, answer_format=formats, timeout=timeout, progress=progress, house=house)
    verdicts = {str(verdict): sum(g.verdict is verdict for g in grades) for verdict in Verdict}
    results = [{"verdict": str(g.verdict), "answer": g.answer, "seconds": round(g.seconds, 6)} for g in grades]
    return {"rows": len(grades), "verdicts": verdicts, "results": results}


def _rows(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    rows = []
    try:
        lines = read_bytes(path).split(b"\n")
    except Unreadable as error:
        raise DataError(path, 0, "file", str(error), "give a JSONL file") from None
    for line, content in enumerate(lines, start=1):
        if not content.strip():
            continue
        try:
            row = from_json(content)
        except Unreadable as error:
            raise DataError(path, line, "row", str(error), "put one JSON object on each line, in UTF-8") from None
        if not isinstance(row, dict):
            raise DataError(path, line, "row", f"is a {type(row).__name__}", "put one JSON object on each line")
        rows.append((line, row))
    return rows


def _text(path: str | Path, line: int, row: dict[str, Any], field: str) -> str:
    if field not in row:
        raise DataError(path, line, field, "is missing", "every row needs gold and prediction")
    if not isinstance(row[field], str):
        raise DataError(path, line, field, f"is a {type(row[field]).__name__}", "write it as a string")
    return row[field]
