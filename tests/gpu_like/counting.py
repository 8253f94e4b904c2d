"""Waits for the device, counted by the line of Python that made them.

A line is that of the innermost frame outside of torch and accelerate, which only pass on what others ask for. Backward
runs in a thread of autograd's own: what it does has no line.

Does not weigh: a wait is one of those at which ``torch.cuda.set_sync_debug_mode`` warns.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PASS_ON = ("torch", "accelerate", "contextlib.py", "functools.py")
OWN = tuple(str(Path(__file__).parent / name) for name in ("counting.py", "tensors.py"))
SITE, OURS = "site-packages/", "/grpo_math/"

_open: list[Counter[str]] = []


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Yield the waits of what is done in it, "file:line function" -> how often. May be nested; each counts."""
    _open.append(Counter())
    try:
        yield _open[-1]
    finally:
        _open.pop()


def waited() -> None:
    for waits in _open:
        waits[_line()] += 1


def of(waits: Counter[str], package: str) -> int:
    """Return the waits by lines of a package."""
    return sum(n for line, n in waits.items() if line.startswith(f"{package}/"))


def _line() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if SITE in path:
            short = path.rpartition(SITE)[2]
        elif OURS in path:
            short = "grpo_math/" + path.rpartition(OURS)[2]
        else:
            short = path.rpartition("/tests/")[2] if "/tests/" in path else path.rpartition("/")[2]
        if not path.startswith(("<", *OWN)) and short.partition("/")[0] not in PASS_ON:
            return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "backward"
