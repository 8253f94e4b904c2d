"""A JSONL file of (gold, prediction) rows -> the verdicts that `grpo-math grade` prints."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError, DataError, cut, require_choice
from grpo_math.grading import Verdict, grade_batch
from grpo_math.grading.formats import FORMATS
from grpo_math.grading.verdict import POLICY, GradingPolicy
from grpo_math.system.reading import Unreadable, from_json
from grpo_math.system.table_files import FAULT, read_table


def grade_file(
    path: str | Path,
    *,
    answer_format: str | None = None,
    timeout: float = 5.0,
    progress: Callable[[int], None] | None = None,
    policy: GradingPolicy = POLICY,
) -> dict[str, Any]:
    """Return {"rows": N, "verdicts": {verdict: count}, "results": [{"verdict", "answer", "seconds"}]}, in row order.

    A row has ``gold`` and ``prediction``, and optionally ``format``. A bad row raises `DataError`.
    """
    if not timeout > 0:
        raise ConfigError("timeout", timeout, "is out of range", "give seconds above 0")
    if answer_format is not None:
        require_choice("format", answer_format, tuple(FORMATS))
    rows = list(_rows(path))
    if not rows:
        raise ConfigError("file", str(path), "has no rows", "check the file")
    golds, predictions = (
        ["" if row[field] is None else str(row[field]) for row in rows] for field in ("gold", "prediction")
    )
    formats = [row.get("format") or answer_format for row in rows]
    grades = grade_batch(golds, predictions, answer_format=formats, timeout=timeout, progress=progress, policy=policy)
    verdicts = {str(verdict): sum(g.verdict is verdict for g in grades) for verdict in Verdict}
    results = [{"verdict": str(g.verdict), "answer": g.answer, "seconds": round(g.seconds, 6)} for g in grades]
    return {"rows": len(grades), "verdicts": verdicts, "results": results}


def _rows(path: str | Path) -> Iterator[dict[str, Any]]:
    for line, content in read_table(path):
        try:
            row = from_json(content) if isinstance(content, bytes) else content
        except Unreadable as error:
            raise DataError(path, line, "row", f"cannot be read ({error.reason})", "write one object a line") from None
        if isinstance(row, dict) and FAULT in row:
            raise DataError(path, line, "row", row[FAULT], "correct the row")
        missing = {"gold", "prediction"} - set(row if isinstance(row, dict) else ())
        if missing:
            raise DataError(path, line, min(missing), "is missing", "give gold and prediction in each row")
        if row.get("format") not in (None, *FORMATS):
            raise DataError(path, line, "format", f"is {cut(row['format'])}", f"use one of {', '.join(FORMATS)}")
        yield row
