"""Waits for the device, counted by the line of Python that made them.

A line is that of the innermost frame outside of torch and accelerate, which only pass on what others ask for. Backward
runs in a thread of autograd's own: what it does has no line.

Does not weigh: a wait is one of those at which ``torch.cuda.set_sync_debug_mode`` warns.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

OURS = 19  # waits of a step by lines of grpo_math besides sampling: a ceiling, as of today
PASSES_ON = re.compile(
    r"<|.*/(site-packages/(torch|accelerate)/|(contextlib|functools)\.py|gpu_like/(counting|tensors))"
)
ABOVE = re.compile(r".*/(?:site-packages|tests)/|.*/(?=grpo_math/)")

_open: list[Counter[str]] = []


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Yield the waits of what is done in it, "file:line function" -> how often."""
    _open.append(Counter())
    yield _open[-1]
    _open.pop()


def waited() -> None:
    """Count a wait."""
    frame = sys._getframe(1)
    while frame is not None and PASSES_ON.match(frame.f_code.co_filename):
        frame = frame.f_back
    line = "backward"
    if frame is not None:
        line = f"{ABOVE.sub('', frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
    for waits in _open:
        waits[line] += 1


def of(waits: Counter[str], package: str) -> int:
    """Return the waits by lines of a package."""
    return sum(n for line, n in waits.items() if line.startswith(f"{package}/"))
