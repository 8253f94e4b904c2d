"""The peaks in the record of a simulated run, on a record that can be worked out on paper."""

from __future__ import annotations

from gpu_like.simulation.allocator import MB
from gpu_like.simulation.record import Record, Storage


def test_peaks_are_what_is_live_at_once_and_loading_leaves_only_what_it_keeps():
    """Weights of 100 MB and something that loading threw away; a cache of 60 MB while generating, 30 MB kept by a
    forward pass, and 40 MB of a backward pass beside it."""
    record = Record()
    record.storages = [
        Storage(50 * MB, "loading"),
        Storage(100 * MB, "loading", kind="weights"),
        Storage(60 * MB, "generation"),
        Storage(30 * MB, "forward"),
        Storage(40 * MB, "backward"),
    ]
    record.events = [1, 2, -1, 3, -3, 4, 5, -5, -4]
    record.phases = [(0, "loading"), (3, "generation"), (5, "forward"), (6, "backward"), (9, "optimizer")]
    in_mb = {"loading": 100, "generation": 160, "forward": 130, "backward": 170}
    assert {phase: size // MB for phase, size in record.peaks().items()} == in_mb
    assert record.answer() == {
        "live": {"training": 170 * MB, "generation": 160 * MB},
        "kinds": {"weights": 100 * MB, "other": 70 * MB},
        "reserved": 180 * MB,  # the 30 MB lie in the block of 60, whose rest grows by a page for the 40 MB
    }
