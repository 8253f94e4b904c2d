"""The model of torch's caching allocator, and the figures of a simulated run, on what can be worked out on paper."""

from __future__ import annotations

import pytest
from gpu_like.simulation.allocator import MB, Allocator
from gpu_like.simulation.record import GENERATION, LOADING, TRAINING, Record, Storage


@pytest.mark.parametrize(("size", "reserved"), [(1, 2), (MB, 2), (MB + 1, 20), (20 * MB, 20), (21 * MB, 40)])
def test_the_first_request_maps_whole_pages(size, reserved):
    allocator = Allocator()
    allocator.take(size)
    assert allocator.reserved == reserved * MB


def test_freed_neighbours_are_joined_and_the_last_block_grows():
    allocator = Allocator()
    a, b, c = (allocator.take(6 * MB) for _ in range(3))  # of one page of 20 MB
    allocator.give(a)
    allocator.give(c)
    assert allocator.take(9 * MB).address == 12 * MB
    assert allocator.reserved == 40 * MB
    allocator.give(b)
    assert allocator.take(12 * MB).address == 0
    assert allocator.reserved == 40 * MB


def test_the_block_that_can_grow_is_taken_last():
    allocator = Allocator()
    gone = allocator.take(16 * MB)
    allocator.take(MB + 1)
    allocator.give(gone)
    assert allocator.take(2 * MB).address == 0, "and not the smaller rest of the page, which can grow"


def test_small_and_large_requests_and_streams_have_pools_of_their_own():
    allocator = Allocator()
    allocator.give(allocator.take(12 * MB))
    allocator.take(MB)
    assert allocator.reserved == 22 * MB
    allocator.take(12 * MB, stream=1)
    assert allocator.reserved == 42 * MB


def test_an_emptied_cache_gives_back_whole_pages_which_are_mapped_again():
    allocator = Allocator()
    before, gone, after = (allocator.take(size * MB) for size in (6, 50, 6))
    allocator.give(gone)
    allocator.empty()
    assert allocator.reserved == 60 * MB
    allocator.give(before)
    allocator.empty()
    assert allocator.reserved == 40 * MB
    assert allocator.take(50 * MB).address == 0
    assert allocator.reserved == 80 * MB
    allocator.give(after)
    allocator.empty()
    assert allocator.reserved == 60 * MB


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
        "reserved": 180 * MB,  # the 30 MB lie in the block of 60, whose rest grows by a page for the 40 MB
    }
