"""The allocations of a simulated run -> its peaks, and the live bytes at the peak of training. Pure.

Does not know where the record comes from: live.py writes it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gpu_like.simulation.allocator import Allocator, Block

LOADING, GENERATION, TRAINING = "loading", "generation", "training"


@dataclass
class Storage:
    """One allocation. ``kind`` is what it turned out to be, if that is known."""

    size: int
    phase: str
    stream: int = 0
    kind: str = "other"


@dataclass
class Record:
    """``events``: +n and -n for the n-th storage's coming and going, n from 1, and 0 for an emptied cache; each with
    the phase in which it happened. The phase of loading comes first."""

    storages: list[Storage] = field(default_factory=list)
    events: list[tuple[int, str]] = field(default_factory=list)

    def _from_loaded(self) -> Iterator[tuple[int, str]]:
        """Yield what loading has left behind, and then every event after it."""
        gone = {-number for number, phase in self.events if phase == LOADING}
        for number, phase in self.events:
            if phase != LOADING or (number > 0 and number not in gone):
                yield number, phase

    def answer(self) -> dict[str, Any]:
        """Return bytes: the peaks of both phases, what is live at the peak of training, and what is reserved at most.

        Training's peak leaves out what generation made, as if something else generated.
        """
        allocator, blocks, reserved = Allocator(), dict[int, Block](), 0
        all_live, generation = 0, None
        kinds, at_peak = Counter[str](), Counter[str]()
        for number, phase in self._from_loaded():
            if number == 0:
                allocator.empty()
                continue
            storage = self.storages[abs(number) - 1]
            if number > 0:
                blocks[number] = allocator.take(storage.size, storage.stream)
                size = storage.size
            else:
                allocator.give(blocks.pop(-number))
                size = -storage.size
            reserved = max(reserved, allocator.reserved)
            all_live += size
            if phase == GENERATION:
                generation = max(generation or 0, all_live)
            if storage.phase != GENERATION:
                kinds[storage.kind] += size
                if kinds.total() > at_peak.total():
                    at_peak = kinds.copy()
        live = {"training": at_peak.total(), "generation": generation}
        return {"live": live, "kinds": dict(at_peak), "reserved": reserved}
