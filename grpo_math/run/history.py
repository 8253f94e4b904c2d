"""Lines of a history: only finite numbers, and the newest line of a step that a resumed run repeats.

>>> settled([{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}, {"step": 1, "reward": 0.3}])
[{'step': 1, 'reward': 0.3}]

Does not read files, and does not judge what a line says.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from grpo_math.run import metrics

Line = dict[str, Any]
LARGEST = 1e100  # what is beyond is no measurement, and its square is no number


def number(value: Any) -> float | None:
    """Return a number of at most `LARGEST`, also from the text that transformers makes of some; else None.

    >>> number("1e-3"), number(64), number(float("nan")), number("grpo"), number(True)
    (0.001, 64, None, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        finite = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if not -LARGEST <= finite <= LARGEST:
        return None
    return value if isinstance(value, int) else finite


def numbers(row: Mapping[str, Any]) -> Line | None:
    """Return the finite numbers of a row, with its step as an int; None for a row without a step.

    >>> numbers({"step": 3.0, "reward": 0.5, "loss": None}), numbers({"reward": 0.5})
    ({'step': 3, 'reward': 0.5}, None)
    """
    line = {name: value for name, item in row.items() if (value := number(item)) is not None}
    return line | {metrics.STEP: int(line[metrics.STEP])} if metrics.STEP in line else None


class Lines:
    """Lines by their steps, as they come."""

    def __init__(self) -> None:
        self._by_step: dict[int, Line] = {}
        self._last = -1

    def put(self, line: Line) -> bool:
        """Add a line to those of its step. Return True if it goes back: its step and all later ones then start anew.

        A line that adds to an earlier step what this lacks, such as its held-out accuracy, does not go back.
        """
        step = line[metrics.STEP]
        known = self._by_step.get(step, {})
        back = bool(known.keys() & line.keys() - {metrics.STEP}) and step < self._last
        if back:
            self._by_step = {earlier: line for earlier, line in self._by_step.items() if earlier < step}
        self._last = step if back else max(step, self._last)
        self._by_step.setdefault(step, {}).update(line)
        return back

    def in_order(self) -> list[Line]:
        return [line for _, line in sorted(self._by_step.items(), key=lambda item: item[0])]


def settled(history: Iterable[Mapping[str, Any]]) -> list[Line]:
    """Return one line for each step, in order.

    >>> settled([{"step": 1, "reward": 0.5}, {"step": 1, "heldout/accuracy": 0.25}, {"step": 2, "reward": None}])
    [{'step': 1, 'reward': 0.5, 'heldout/accuracy': 0.25}, {'step': 2}]
    """
    lines = Lines()
    for row in history:
        if (line := numbers(row)) is not None:
            lines.put(line)
    return lines.in_order()
