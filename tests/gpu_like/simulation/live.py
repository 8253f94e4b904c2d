"""What is live on the pretended GPU: every storage with its size, when it came and went, in which phase, and the line
that made it.

Does not know what an allocator makes of it (allocator.py), nor what the figures mean (record.py).
"""

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from gpu_like.answers import Stream
from gpu_like.simulation import workspace
from gpu_like.simulation.record import BETWEEN, LOADING, Record, Storage
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

NAMED = 1 << 16  # bytes from which the line is looked up
ROOMS = ("grpo_math", "trl", "transformers", "peft", "bitsandbytes")  # whose lines are named, and not those of torch
HELPERS = "gpu_like/simulation"


class Live:
    """Writes ``record`` while a program runs on the pretended GPU."""

    def __init__(self) -> None:
        self.record, self.phase = Record(phases=[(0, LOADING)]), LOADING
        self._held: dict[int, tuple[int, Any]] = {}
        self._forward: dict[int, str] = {}  # autograd's number of a node -> the line of its forward

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def enter(self, phase: str = BETWEEN) -> None:
        self.phase = phase
        self.record.phases.append((len(self.record.events), phase))

    def after(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Hears of every operator on the pretended GPU."""
        line = self._line() if torch.is_grad_enabled() else None
        for size in workspace.of(func, args, out):
            line = line or self._line()
            self._came(Storage(size, self.phase, line, (size,), "uint8", kind="workspace of kernels"))
            self.record.events.append(-len(self.record.storages))
        for tensor in tree_leaves(out):
            if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != "cuda":
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._held or not (size := storage.nbytes()):
                continue
            line = line or (self._line() if size >= NAMED else "")
            dtype = str(tensor.dtype).removeprefix("torch.")
            stream = Stream.current
            number = self._came(Storage(size, self.phase, line, tuple(tensor.shape), dtype, stream))
            self._held[key] = number, weakref.ref(storage, partial(self._went, key))

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

    def _line(self) -> str:
        """The innermost line of the program or of a library of models; of what autograd runs, that of its forward."""
        frame: FrameType | None = sys._getframe(2)
        node = torch._C._current_autograd_node()
        while frame is not None:
            path, name = frame.f_code.co_filename, frame.f_code.co_name
            if name == "_engine_run_backward" and node is not None:
                made = self._forward.get(node._sequence_nr(), "")
                return f"{node.name()} of {made}" if made else node.name()
            room = next((room for room in ROOMS if f"/{room}/" in path), None)
            if room and HELPERS not in path:
                line = f"{room}/{path.rpartition(f'/{room}/')[2]}:{frame.f_lineno} {name}"
                if torch.is_grad_enabled():
                    self._forward[torch.autograd._get_sequence_nr() - 1] = line
                return line
            frame = frame.f_back
        return "torch"
