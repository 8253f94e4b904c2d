"""Memory of the pretended GPU during a simulated run: every storage with its size and phase -> the peaks of the run."""

import weakref
from collections import Counter
from typing import Any

from gpu_like.simulation import workspace
from gpu_like.simulation.allocator import Allocator
from gpu_like.tensors import Cuda
from torch.utils._pytree import tree_leaves

LOADING, GENERATION, TRAINING = "loading", "generation", "training"


class Record:
    """``phase`` is the program's to set; loading comes first.

    ``storages``: the size of each, and its phase. ``events``: +n and -n if the n-th storage comes and goes, n from 1,
    and 0 for an emptied cache; each with its phase.
    """

    def __init__(self) -> None:
        self.storages: list[tuple[int, str]] = []
        self.events: list[tuple[int, str]] = []
        self.phase = LOADING
        self._numbers: dict[int, int] = {}  # of the storages that live

    def heard(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Called after every operator on the pretended GPU."""
        for tensor in tree_leaves(out):
            if isinstance(tensor, Cuda) and tensor.is_cuda:
                storage = tensor.inner.untyped_storage()
                key = storage._cdata
                if key not in self._numbers and storage.nbytes():
                    self._numbers[key] = self.came(storage.nbytes())
                    weakref.finalize(storage, self._went, key).atexit = False
        # A kernel takes its workspaces next to its output, and frees them all at its end.
        for number in [self.came(size) for size in workspace.of(func, args)]:
            self.happened(-number)

    def came(self, size: int) -> int:
        self.storages.append((size, self.phase))
        self.happened(len(self.storages))
        return len(self.storages)

    def _went(self, key: int) -> None:
        self.happened(-self._numbers.pop(key))

    def happened(self, number: int) -> None:
        self.events.append((number, self.phase))

    def answer(self) -> dict[str, Any]:
        """Return bytes: the peaks of both phases, and what is reserved at most.

        Only what loading keeps counts. Training's peak excludes what generation made, as if something else generated.
        """
        allocator, blocks, reserved = Allocator(), {}, [0]
        live, peaks = Counter[str](), Counter[str]()
        gone = {-number for number, phase in self.events if phase == LOADING}
        for number, phase in self.events:
            if phase == LOADING and (number <= 0 or number in gone):
                continue
            if number == 0:
                allocator.empty()
                continue
            size, made_in = self.storages[abs(number) - 1]
            if number > 0:
                blocks[number] = allocator.take(size)
            else:
                allocator.give(blocks.pop(-number))
            reserved.append(allocator.reserved)
            live[made_in] += size if number > 0 else -size
            if phase == GENERATION:
                peaks[GENERATION] = max(peaks[GENERATION], live.total())
            peaks[TRAINING] = max(peaks[TRAINING], live[LOADING] + live[TRAINING])
        return {"live": {phase: peaks[phase] for phase in (TRAINING, GENERATION)}, "reserved": max(reserved)}
