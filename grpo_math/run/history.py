"""The lines of a history as they count: finite numbers alone, and of a step that a resumed run repeats the newest.

>>> settled([{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}, {"step": 1, "reward": 0.3}])
[{'step': 1, 'reward': 0.3}]

Does not read files, and does not judge what a line says.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_math.run import metrics

Line = dict[str, Any]
LARGEST = 1e100  # what is beyond is no measurement, and its square is no number


def number(value: Any) -> float | None:
    """A number of at most `LARGEST`, also out of the text that transformers makes of some; None for anything else.

    >>> number("1e-3"), number(64), number(float("nan")), number("grpo"), number(True)
    (0.001, 64, None, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if not -LARGEST <= found <= LARGEST:
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


class Lines:
    """Lines by their steps, as they come: each is put in time that does not go with the number of lines."""

    def __init__(self) -> None:
        self._by_step: dict[int, Line] = {}
        self._steps: list[int] = []  # in order

    def put(self, line: Line) -> bool:
        """Add a line to those of its step. Whether it goes back: it then starts its step and all later ones anew.

        A line that adds to an earlier step what this lacks, such as its held-out accuracy, does not go back.
        """
        step = line[metrics.STEP]
        known = self._by_step.get(step, {})
        back = bool(known.keys() & line.keys() - {metrics.STEP}) and step < self._steps[-1]
        if back:
            first = bisect_left(self._steps, step)
            for later in self._steps[first:]:
                del self._by_step[later]
            del self._steps[first:]
        if step not in self._by_step:
            self._by_step[step] = {}
            insort(self._steps, step)
        self._by_step[step].update(line)
        return back

    def in_order(self) -> list[Line]:
        return [self._by_step[step] for step in self._steps]


def settled(history: Iterable[Mapping[str, Any]]) -> list[Line]:
    """One line a step, in order.

    >>> settled([{"step": 1, "reward": 0.5}, {"step": 1, "heldout/accuracy": 0.25}, {"step": 2, "reward": None}])
    [{'step': 1, 'reward': 0.5, 'heldout/accuracy': 0.25}, {'step': 2}]
    """
    lines = Lines()
    for row in history:
        if (line := numbers(row)) is not None:
            lines.put(line)
    return lines.in_order()
