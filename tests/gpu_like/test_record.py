"""The model of torch's caching allocator, and the figures of a simulated run, on what can be worked out on paper."""

import pytest
from gpu_like.simulation.allocator import MB, Allocator
from gpu_like.simulation.record import GENERATION, LOADING, TRAINING, Record


@pytest.mark.parametrize(("size", "reserved"), [(1, 2), (MB, 2), (MB + 1, 20), (20 * MB, 20), (21 * MB, 40)])
def test_the_first_request_maps_whole_pages(size, reserved):
    allocator = Allocator()
    allocator.take(size)
    assert allocator.reserved == reserved * MB


def test_peaks_are_what_is_live_at_once_and_loading_leaves_only_what_it_keeps():
    """Weights of 100 MB and something that loading threw away; a cache of 60 MB while generating, 30 MB kept by a
    forward pass, and 40 MB of a backward pass beside it."""
    record = Record()
    for phase, changes in ((LOADING, [50, 100, -1]), (GENERATION, [60, -3]), (TRAINING, [30, 40, -5, -4])):
        record.phase = phase
        for change in changes:
            record.came(change * MB) if change > 0 else record.happened(change)
    assert record.answer() == {
        "live": {"training": 170 * MB, "generation": 160 * MB},
        "reserved": 180 * MB,  # the 30 MB lie in the block of 60, whose rest grows by a page for the 40 MB
    }
