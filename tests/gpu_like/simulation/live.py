"""Live memory of the pretended GPU: every storage with its size, when it came and went, and in which phase.

Does not know what an allocator makes of it (allocator.py), nor what the figures mean (record.py).
"""

import weakref
from typing import Any

from gpu_like.answers import Stream
from gpu_like.simulation import workspace
from gpu_like.simulation.record import LOADING, Record, Storage
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves


class Live:
    """Writes ``record`` while a program runs on the pretended GPU. ``phase`` is the program's to set."""

    def __init__(self) -> None:
        self.record, self.phase = Record(), LOADING
        self._held: dict[int, int] = {}

    def after(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Hears of every operator on the pretended GPU."""
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda":
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._held and storage.nbytes():
                    self._held[key] = self._came(storage.nbytes(), Stream.current)
                    weakref.finalize(storage, self._went, key).atexit = False
        # A kernel takes its workspaces next to its output, and frees them all at its end.
        for number in [self._came(size) for size in workspace.of(func, args, out)]:
            self._happened(-number)

    def _came(self, size: int, stream: int = 0) -> int:
        self.record.storages.append(Storage(size, self.phase, stream))
        number = len(self.record.storages)
        self._happened(number)
        return number

    def _went(self, key: int) -> None:
        self._happened(-self._held.pop(key))

    def emptied(self) -> None:
        self._happened(0)

    def _happened(self, number: int) -> None:
        self.record.events.append((number, self.phase))

    def name(self, tensor: Any, kind: str) -> None:
        """Say what a tensor's storage is."""
        if isinstance(tensor, FakeTensor) and (number := self._held.get(tensor.untyped_storage()._cdata)):
            self.record.storages[number - 1].kind = kind
