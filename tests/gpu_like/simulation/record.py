"""The allocations of a simulated run -> its peaks by phase, and the live bytes at the peak of training. Pure.

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
    """``events``: +n and -n for the n-th storage's coming and going, n from 1, 0 for an emptied cache; ``phases``: how
    many events there were when each phase began."""

    storages: list[Storage] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)

    def _told(self) -> Iterator[tuple[int, str]]:
        """Every event with its phase, from the moment when the model is loaded: what it left behind comes first."""
        loaded = next((position for position, phase in self.phases if phase != LOADING), 0)
        gone = {-event for event in self.events[:loaded] if event < 0}
        for event in self.events[:loaded]:
            if event > 0 and event not in gone:
                yield event, LOADING
        marks = [mark for mark in self.phases if mark[0] >= loaded]
        for (start, phase), (end, _) in zip(marks, [*marks[1:], (len(self.events), "")], strict=True):
            for event in self.events[start:end]:
                yield event, phase

    def peaks(self) -> dict[str, int]:
        """Most bytes at once in each phase.

        >>> storages, phases = [Storage(8, "loading"), Storage(4, "forward")], [(0, "loading"), (1, "forward")]
        >>> record = Record(storages, [1, 2, -2], phases)
        >>> record.peaks()
        {'loading': 8, 'forward': 12}
        """
        now, peaks = 0, dict[str, int]()
        for event, phase in self._told():
            if event:
                size = self.storages[abs(event) - 1].size
                now += size if event > 0 else -size
            peaks[phase] = max(peaks.get(phase, 0), now)
        return peaks

    def training(self) -> dict[str, int]:
        """Bytes of each kind at the peak, as if something else generated."""
        now, top = Counter[str](), Counter[str]()
        for event, _ in self._told():
            storage = self.storages[abs(event) - 1]
            if event and storage.phase != GENERATION:
                now[storage.kind] += storage.size if event > 0 else -storage.size
                if now.total() > top.total():
                    top = now.copy()
        return dict(top)

    def reserved(self) -> int:
        """Most bytes that the caching allocator has reserved."""
        allocator, blocks, most = Allocator(), dict[int, Block](), 0
        for event, _ in self._told():
            if event > 0:
                storage = self.storages[event - 1]
                blocks[event] = allocator.take(storage.size, storage.stream)
            elif event < 0:
                allocator.give(blocks.pop(-event))
            else:
                allocator.empty()
            most = max(most, allocator.reserved)
        return most

    def answer(self) -> dict[str, Any]:
        """In bytes."""
        kinds = self.training()
        live = {"training": sum(kinds.values()), "generation": self.peaks().get(GENERATION)}
        return {"live": live, "kinds": kinds, "reserved": self.reserved()}
