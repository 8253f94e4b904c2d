"""Lines of a history: only finite numbers, one line for each step.

A resumed run drops the steps after its checkpoint from history.jsonl before it writes them again (log.py), so that no
line of another attempt is left.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_math.run import metrics

Line = dict[str, Any]
LARGEST = 1e100  # a larger number is not a measurement, and its square may overflow


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a file that are complete: a full disk or a kill may have cut the last line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def number(value: Any) -> float | None:
    """Return a number of at most `LARGEST`, also from a text, as transformers writes some numbers; else None.

    >>> [number(value) for value in ("1e-3", 64, 1e100, -1e100)]
    [0.001, 64, 1e+100, -1e+100]
    >>> {number(value) for value in (float("nan"), float("-inf"), "grpo", True, 1.1e100, 10**400, [1])}
    {None}
    """
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, bool) and abs(float(value)) <= LARGEST:
            return value if isinstance(value, int) else float(value)
    return None


def numbers(row: Mapping[str, Any]) -> Line | None:
    """Return the finite numbers of a row, with its step as an int; None for a row without a step.

    >>> numbers({"step": 3.0, "reward": 0.5, "loss": None}), numbers({"reward": 0.5})
    ({'step': 3, 'reward': 0.5}, None)
    """
    line = {name: value for name, item in row.items() if (value := number(item)) is not None}
    return line | {metrics.STEP: int(line[metrics.STEP])} if metrics.STEP in line else None


def settled(history: Iterable[Mapping[str, Any]]) -> list[Line]:
    """Return one line for each step, in order. A later line adds to an earlier one of its step, or replaces its values.

    >>> settled([{"step": "2", "loss": 1}, {"loss": 9}, {"step": 1.0}, {"step": 2, "loss": None, "kl": 0.5}])
    [{'step': 1}, {'step': 2, 'loss': 1, 'kl': 0.5}]
    >>> settled([{"step": 1, "reward": 0.5}, {"step": 1, "reward": 0.25}])
    [{'step': 1, 'reward': 0.25}]
    """
    by_step: dict[int, Line] = {}
    for row in history:
        if (line := numbers(row)) is not None:
            by_step.setdefault(line[metrics.STEP], {}).update(line)
    return [by_step[step] for step in sorted(by_step)]
