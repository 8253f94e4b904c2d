"""What torch's caching allocator reserves of a GPU for a row of allocations, with the expandable segments that
training sets (train/program.py): a model of c10/cuda/CUDACachingAllocator.

There is a pool for requests of up to 1 MB and one for larger ones, and each pool has one segment: a row of blocks that
ends with address space without memory. A request is rounded to 512 bytes and takes the smallest free block that holds
it, and the rest of the block is split off. If there is none, memory is mapped behind the blocks, in pages of 2 MB for
small requests and 20 MB for larger ones. A block that is freed is joined with its free neighbours and keeps its memory,
until the cache is emptied.

Does not know the settings of PYTORCH_CUDA_ALLOC_CONF, side streams, nor that a full GPU empties the cache.
"""

from bisect import bisect
from itertools import pairwise, takewhile
from typing import NamedTuple

MB = 1 << 20
ROUND, SMALL, ADDRESSES = 512, MB, 1 << 60
USED, FREE, UNMAPPED = "used", "free", "unmapped"


class Block(NamedTuple):
    address: int
    size: int
    state: str

    @property
    def end(self) -> int:
        return self.address + self.size


class Segment:
    """The blocks of one pool, by address."""

    def __init__(self, page: int) -> None:
        self.page, self.reserved = page, 0
        self.blocks = [Block(0, ADDRESSES, UNMAPPED)]

    def mark(self, address: int, size: int, state: str) -> None:
        """Give a part of one block a state. Neighbours in the same state are joined, unless they are used."""
        number = bisect(self.blocks, address, key=lambda block: block.address) - 1
        old, first = self.blocks[number], max(0, number - 1)
        before, after = (address - old.address, old.state), (old.end - address - size, old.state)
        joined = self.blocks[first:number]
        following = [(block.size, block.state) for block in self.blocks[number + 1 : number + 2]]
        for length, kind in (before, (size, state), after, *following):
            if joined and joined[-1].state == kind != USED:
                joined[-1] = joined[-1]._replace(size=joined[-1].size + length)
            elif length:
                joined.append(Block(joined[-1].end if joined else old.address, length, kind))
        self.blocks[first : number + 2] = joined
        self.reserved += ((state != UNMAPPED) - (old.state != UNMAPPED)) * size

    def fitting(self, size: int) -> int | None:
        """The address of the free block to take. One that can grow counts with its address space: it is taken last."""
        fits = [
            (length, length + after.size * (after.state == UNMAPPED), address)
            for (address, length, state), after in pairwise(self.blocks)
            if state == FREE and length >= size
        ]
        fits.sort()
        for (_, reach, address), (_, of_larger, _) in pairwise(fits):
            if of_larger >= reach:
                return address
        return fits[-1][2] if fits else None

    def grown(self, size: int) -> int:
        """The lowest address where memory can be mapped for a free block of this size."""
        for number, block in enumerate(self.blocks):
            free = list(takewhile(lambda block: block.state != USED, self.blocks[number:]))
            if any(block.state == UNMAPPED for block in free[:2]) and sum(block.size for block in free) >= size:
                break
        missing = size
        for hole in free:
            if hole.state == UNMAPPED and missing > 0:
                self.mark(hole.address, min(hole.size, -(-missing // self.page) * self.page), FREE)
            missing -= hole.size
        return block.address

    def empty(self) -> None:
        """Unmap whole pages. The ends of a block share their pages with other blocks."""
        for block in list(self.blocks):
            start, end = -(-block.address // self.page) * self.page, block.end // self.page * self.page
            if block.state == FREE and start < end:
                self.mark(start, end - start, UNMAPPED)


class Allocator:
    """``reserved``: bytes that the GPU has given."""

    def __init__(self) -> None:
        self.small, self.large = Segment(2 * MB), Segment(20 * MB)

    @property
    def reserved(self) -> int:
        return self.small.reserved + self.large.reserved

    def take(self, size: int) -> Block:
        size = max(ROUND, -(-size // ROUND) * ROUND)
        segment = self._of(size)
        address = segment.fitting(size)
        block = Block(segment.grown(size) if address is None else address, size, USED)
        segment.mark(*block)
        return block

    def give(self, block: Block) -> None:
        self._of(block.size).mark(block.address, block.size, FREE)

    def _of(self, size: int) -> Segment:
        return self.small if size <= SMALL else self.large

    def empty(self) -> None:
        """``torch.cuda.empty_cache()``: pages of which nothing is in use go back to the GPU."""
        self.small.empty()
        self.large.empty()
