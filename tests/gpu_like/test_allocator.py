"""The model of torch's caching allocator, on rows of allocations whose answer can be worked out on paper."""

from __future__ import annotations

import pytest
from gpu_like.simulation.allocator import MB, Allocator


@pytest.mark.parametrize(
    ("size", "reserved"),
    [(1, 2), (MB, 2), (MB + 1, 20), (10 * MB - 512, 20), (10 * MB, 10), (11 * MB, 12), (70 * MB, 70)],
)
def test_the_first_request_asks_for_a_segment_of_the_size_that_torch_asks_for(size, reserved):
    allocator = Allocator()
    allocator.take(size)
    assert allocator.reserved == reserved * MB


def test_freed_neighbours_are_joined_and_others_are_not():
    allocator = Allocator()
    a, b, c = (allocator.take(6 * MB) for _ in range(3))  # of one segment of 20 MB
    allocator.give(a)
    allocator.give(c)
    allocator.take(9 * MB)
    assert allocator.reserved == 40 * MB
    allocator = Allocator()
    a, b, c = (allocator.take(6 * MB) for _ in range(3))
    allocator.give(a)
    allocator.give(c)
    allocator.give(b)
    assert allocator.take(20 * MB).size == 20 * MB
    assert allocator.reserved == 20 * MB


def test_small_and_large_requests_and_streams_have_pools_of_their_own():
    allocator = Allocator()
    allocator.give(allocator.take(12 * MB))
    allocator.take(MB)
    assert allocator.reserved == 14 * MB
    allocator.take(12 * MB, stream=1)
    assert allocator.reserved == 26 * MB


def test_an_emptied_cache_gives_back_the_segments_of_which_nothing_is_in_use():
    allocator = Allocator()
    held, gone = allocator.take(6 * MB), allocator.take(30 * MB)
    allocator.give(gone)
    allocator.empty()
    assert allocator.reserved == 20 * MB
    allocator.give(held)
    allocator.empty()
    assert allocator.reserved == 0
