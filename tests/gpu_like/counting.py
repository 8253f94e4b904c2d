"""Waits for the device and kernel launches, counted by the line of Python that made them.

A line is that of the innermost frame outside of torch and accelerate, which only pass on what others ask for. Backward
runs in a thread of autograd's own: what it does has no line.

Does not weigh: a launch is an operator that computes, whatever CUDA would make of it; a wait is one of those at which
``torch.cuda.set_sync_debug_mode`` warns.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

PASS_ON = ("torch", "accelerate", "contextlib.py", "functools.py")
OWN = tuple(str(Path(__file__).parent / name) for name in ("counting.py", "tensors.py"))
SITE, OURS = "site-packages/", "/grpo_math/"


@dataclass
class Counts:
    """``synchronisations``: "file:line function" -> how often; ``kernels``: operator -> how often."""

    synchronisations: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)

    @property
    def launches(self) -> int:
        return self.kernels.total()

    def of(self, package: str) -> int:
        """Synchronisations by lines of a package."""
        return sum(n for line, n in self.synchronisations.items() if line.startswith(f"{package}/"))


_open: list[Counts] = []


@contextmanager
def counting() -> Iterator[Counts]:
    """What is done in it. May be nested; each counts."""
    counts = Counts()
    _open.append(counts)
    try:
        yield counts
    finally:
        _open.remove(counts)


def launched(name: str, times: int = 1) -> None:
    for counts in _open:
        counts.kernels[name] += times


def waited() -> None:
    if _open:
        line = _line()
        for counts in _open:
            counts.synchronisations[line] += 1


class Memory:
    """Bytes of the storages on the device, and the most at once since `reset`."""

    def __init__(self) -> None:
        self.allocated, self.peak = 0, 0
        self._held: dict[int, int] = {}

    def take(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor until it is freed. A view takes nothing."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._held and size:
            self._held[key] = size
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
            weakref.finalize(storage, self._give, key).atexit = False

    def _give(self, key: int) -> None:
        self.allocated -= self._held.pop(key)

    def reset(self) -> None:
        self.peak = self.allocated


memory = Memory()


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
