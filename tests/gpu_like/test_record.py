"""The model of torch's caching allocator, and the figures of a simulated run, on what can be worked out on paper."""

from __future__ import annotations

import pytest
from gpu_like.simulation.allocator import MB, Allocator
from gpu_like.simulation.record import GENERATION, LOADING, TRAINING, Record, Storage


@pytest.mark.parametrize(
    ("size", "reserved"),
    [(1, 2), (MB, 2), (MB + 1, 20), (10 * MB - 512, 20), (10 * MB, 10), (11 * MB, 12), (70 * MB, 70)],
)
def test_the_first_request_asks_for_a_segment_of_the_size_that_torch_asks_for(size, reserved):
    allocator = Allocator()
    allocator.take(size)
    assert allocator.reserved == reserved * MB


def test_freed_neighbours_are_joined_within_a_pool_and_an_emptied_cache_gives_back_whole_segments():
    allocator = Allocator()
    a, b, c = (allocator.take(6 * MB) for _ in range(3))  # of one segment of 20 MB
    for block in (a, c):
        allocator.give(block)
    allocator.give(allocator.take(9 * MB))  # b is between: 6 MB and 8 MB are free
    assert allocator.reserved == 40 * MB
    allocator.empty()
    assert allocator.reserved == 20 * MB
    allocator.give(b)
    assert allocator.take(20 * MB).size == 20 * MB
    allocator.take(MB)  # a pool of small requests, and one for each stream
    allocator.take(12 * MB, stream=1)
    assert allocator.reserved == (20 + 2 + 12) * MB


def test_peaks_are_what_is_live_at_once_and_loading_leaves_only_what_it_keeps():
    """Weights of 100 MB and something that loading threw away; a cache of 60 MB while generating, 30 MB kept by a
    forward pass, and 40 MB of a backward pass beside it."""
    record = Record(
        [
            Storage(50 * MB, LOADING),
            Storage(100 * MB, LOADING, kind="weights"),
            Storage(60 * MB, GENERATION),
            Storage(30 * MB, TRAINING),
            Storage(40 * MB, TRAINING),
        ]
    )
    record.events += [(number, LOADING) for number in (1, 2, -1)]
    record.events += [(number, GENERATION) for number in (3, -3)]
    record.events += [(number, TRAINING) for number in (4, 5, -5, -4)]
    assert record.answer() == {
        "live": {"training": 170 * MB, "generation": 160 * MB},
        "kinds": {"weights": 100 * MB, "other": 70 * MB},
        "reserved": 200 * MB,  # the 30 MB lie in the block of 60, whose rest is too small
    }
