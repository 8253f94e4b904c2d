"""The lines of a history as they count: finite numbers alone, and of a step that a resumed run repeats the newest.

>>> settled([{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}, {"step": 1, "reward": 0.3}])
[{'step': 1, 'reward': 0.3}]

Does not read files, and does not judge what a line says.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_math.run import metrics

Line = dict[str, Any]


def number(value: Any) -> float | None:
    """A finite number, also out of the text that transformers makes of some; None for anything else.

    >>> number("1e-3"), number(64), number(float("nan")), number("grpo"), number(True)
    (0.001, 64, None, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if not math.isfinite(found):
        return None
    return value if isinstance(value, int) else found


def numbers(row: Mapping[str, Any]) -> Line | None:
    """The finite numbers of a row, with its step as an int; None of a row without a step.

    >>> numbers({"step": 3.0, "reward": 0.5, "loss": None}), numbers({"reward": 0.5})
    ({'step': 3, 'reward': 0.5}, None)
    """
    line = {name: value for name, item in row.items() if (value := number(item)) is not None}
    return line | {metrics.STEP: int(line[metrics.STEP])} if metrics.STEP in line else None


def as_now(line: Line) -> Line:
    """A line of a history.jsonl as it is read: an earlier version's held-out accuracy was that in the format.

    >>> as_now({"step": 20, "heldout/accuracy": 0.5, "heldout/n": 64})
    {'step': 20, 'heldout/n': 64, 'heldout/accuracy_in_format': 0.5}
    """
    if metrics.HELDOUT_ACCURACY not in line or metrics.HELDOUT_IN_FORMAT in line:
        return line
    rest = {name: value for name, value in line.items() if name != metrics.HELDOUT_ACCURACY}
    return rest | {metrics.HELDOUT_IN_FORMAT: line[metrics.HELDOUT_ACCURACY]}


def put(lines: dict[int, Line], line: Line) -> bool:
    """Add a line to those of its step. Whether it goes back: it then starts its step and all later ones anew.

    A line that adds to an earlier step what this lacks, such as its held-out accuracy, does not go back.
    """
    step = line[metrics.STEP]
    back = bool(lines) and step < max(lines) and bool(lines.get(step, {}).keys() & line.keys() - {metrics.STEP})
    if back:
        for later in [known for known in lines if known >= step]:
            del lines[later]
    lines.setdefault(step, {}).update(line)
    return back


def settled(history: Iterable[Mapping[str, Any]]) -> list[Line]:
    """One line a step, in order.

    >>> settled([{"step": 1, "reward": 0.5}, {"step": 1, "heldout/accuracy": 0.25}, {"step": 2, "reward": None}])
    [{'step': 1, 'reward': 0.5, 'heldout/accuracy': 0.25}, {'step': 2}]
    """
    lines: dict[int, Line] = {}
    for row in history:
        if (line := numbers(row)) is not None:
            put(lines, line)
    return [lines[step] for step in sorted(lines)]
