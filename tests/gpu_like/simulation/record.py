"""What was allocated in a simulated run -> its peaks by phase and by kind, and the largest tensors. Pure.

Does not know where the record comes from: live.py writes it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gpu_like.simulation.allocator import Allocator, Block

# In the order of an optimizer step. The trial of the largest micro-batch is a forward and a backward pass as well.
PHASES = ("generation", "scoring", "forward", "backward", "optimizer")
LOADING, BETWEEN = "loading", "between"


@dataclass
class Storage:
    """One allocation. ``kind`` is what it turned out to be, where that was said."""

    size: int
    phase: str
    line: str
    shape: tuple[int, ...]
    dtype: str
    stream: int = 0
    kind: str = ""

    def sort(self) -> str:
        """Its kind, or what its phase and its line make of it."""
        if self.kind:
            return self.kind
        if "ChunkedLogProb" in self.line or "chunked_logprob" in self.line:
            return "LM head"
        if self.phase == "generation":
            return "KV cache" if any(word in self.line for word in ("decoding.py", "cache_utils.py")) else "sampling"
        if self.phase == "backward":
            return "gradients of activations" if "Backward" in self.line else "recomputed activations"
        return {"forward": "activations", "optimizer": "optimizer's temporaries"}.get(self.phase, "rollout")


@dataclass
class Record:
    """``events``: +n and -n for the n-th storage's coming and going, n from 1, 0 for an emptied cache; ``phases``: how
    many events there were when each phase began."""

    storages: list[Storage] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)

    def told(self, training: bool = False) -> Iterator[tuple[int, str]]:
        """Every event with its phase, from the moment when the model is loaded: what it left behind comes first.

        ``training``: as if something else generated.
        """
        if training:
            return (one for one in self.told() if not one[0] or self._of(one[0]).phase != "generation")
        return self._told()

    def _of(self, event: int) -> Storage:
        return self.storages[abs(event) - 1]

    def _told(self) -> Iterator[tuple[int, str]]:
        loaded = next((position for position, phase in self.phases if phase != LOADING), 0)
        gone = {-event for event in self.events[:loaded] if event < 0}
        for event in self.events[:loaded]:
            if event > 0 and event not in gone:
                yield event, LOADING
        marks = [mark for mark in self.phases if mark[0] >= loaded]
        for (start, phase), (end, _) in zip(marks, [*marks[1:], (len(self.events), "")], strict=True):
            for event in self.events[start:end]:
                yield event, phase

    def live(self, training: bool = False) -> tuple[dict[str, int], list[Storage]]:
        """(most bytes at once in each phase, the storages at the highest of these moments).

        >>> record = Record([Storage(8, "loading", "", (2,), "float32"), Storage(4, "forward", "", (1,), "float32")])
        >>> record.events, record.phases = [1, 2, -2], [(0, "loading"), (1, "forward")]
        >>> record.live()[0], [storage.size for storage in record.live()[1]]
        ({'loading': 8, 'forward': 12}, [8, 4])
        """
        now, top, peaks = 0, (0, 0), dict[str, int]()
        events = list(self.told(training))
        for number, (event, phase) in enumerate(events):
            if event:
                size = self._of(event).size
                now += size if event > 0 else -size
            peaks[phase] = max(peaks.get(phase, 0), now)
            top = max(top, (now, -number))  # the first of equal moments
        held = dict[int, None]()
        for event, _ in events[: 1 - top[1]]:
            if event > 0:
                held[event] = None
            else:
                held.pop(-event, None)
        return peaks, [self.storages[number - 1] for number in held]

    def reserved(self, training: bool = False) -> dict[str, int]:
        """Bytes that the caching allocator has reserved by the end of each phase, at most."""
        allocator, blocks, most = Allocator(), dict[int, Block](), dict[str, int]()
        for event, phase in self.told(training):
            if event > 0:
                storage = self.storages[event - 1]
                blocks[event] = allocator.take(storage.size, storage.stream)
            elif event < 0:
                allocator.give(blocks.pop(-event))
            else:
                allocator.empty()
            most[phase] = max(most.get(phase, 0), allocator.reserved)
        return most

    def answer(self) -> dict[str, Any]:
        """As `grpo-math plan --simulate --json` prints it; bytes."""
        peaks, existing = self.live()
        alone, trained = self.live(training=True)
        reserved = self.reserved()
        largest = sorted(existing, key=lambda storage: -storage.size)[:10]
        phases = {phase: {"live": peaks[phase], "reserved": reserved[phase]} for phase in PHASES if phase in peaks}
        return {
            "live": max(peaks.values()),
            "reserved": max(reserved.values()),
            "training": {
                "live": max(alone.values()),
                "reserved": max(self.reserved(training=True).values()),
                "kinds": _kinds(trained),
            },
            "peak_phase": max(phases, key=lambda phase: phases[phase]["live"]),
            "phases": phases,
            "kinds": _kinds(existing),
            "largest": [
                {"bytes": s.size, "shape": list(s.shape), "dtype": s.dtype, "kind": s.sort(), "line": s.line}
                for s in largest
            ],
        }


def _kinds(storages: list[Storage]) -> dict[str, int]:
    """Bytes of each kind, the most first."""
    kinds: dict[str, int] = {}
    for storage in storages:
        kinds[storage.sort()] = kinds.get(storage.sort(), 0) + storage.size
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))
