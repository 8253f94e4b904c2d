"""Live memory of the pretended GPU: every storage with its size, when it came and went, and in which phase.

Does not know what an allocator makes of it (allocator.py), nor what the figures mean (record.py).
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from gpu_like.answers import Stream
from gpu_like.simulation import workspace
from gpu_like.simulation.record import GENERATION, LOADING, TRAINING, Record, Storage
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves


class Live:
    """Writes ``record`` while a program runs on the pretended GPU."""

    def __init__(self) -> None:
        self.record, self.phase = Record(phases=[(0, LOADING)]), LOADING
        self._held: dict[int, tuple[int, Any]] = {}

    @contextmanager
    def generating(self) -> Iterator[None]:
        self.enter(GENERATION)
        yield
        self.enter(TRAINING)

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.record.phases.append((len(self.record.events), phase))

    def after(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Hears of every operator on the pretended GPU."""
        for tensor in tree_leaves(out):
            if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != "cuda":
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._held or not (size := storage.nbytes()):
                continue
            number = self._came(Storage(size, self.phase, Stream.current))
            self._held[key] = number, weakref.ref(storage, partial(self._went, key))
        # A kernel takes its workspaces beside its output, and frees them all at its end.
        taken = [self._came(Storage(size, self.phase)) for size in workspace.of(func, args, out)]
        self.record.events += [-number for number in taken]

    def _came(self, storage: Storage) -> int:
        self.record.storages.append(storage)
        self.record.events.append(len(self.record.storages))
        return len(self.record.storages)

    def _went(self, key: int, dead: Any) -> None:
        if (held := self._held.pop(key, None)) is not None:
            self.record.events.append(-held[0])

    def emptied(self) -> None:
        self.record.events.append(0)

    def name(self, tensor: Any, kind: str) -> None:
        """Say what a tensor's storage is."""
        if isinstance(tensor, FakeTensor) and (held := self._held.get(tensor.untyped_storage()._cdata)):
            self.record.storages[held[0] - 1].kind = kind
