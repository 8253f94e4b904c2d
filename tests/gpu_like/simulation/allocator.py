"""What torch's caching allocator reserves of a GPU for a row of allocations, with the expandable segments that
training sets (train/program.py): a model of c10/cuda/CUDACachingAllocator.

There is a pool for requests of up to 1 MB and one for larger ones, for each stream, and each pool has one segment: a
row of blocks that ends with address space without memory. A request is rounded to 512 bytes and takes the smallest free
block that holds it, and the rest of the block is split off. If there is none, memory is mapped behind the blocks, in
pages of 2 MB for small requests and 20 MB for larger ones. A block that is freed is joined with its free neighbours and
keeps its memory, until the cache is emptied.

Does not know the settings of PYTORCH_CUDA_ALLOC_CONF, nor that a full GPU empties the cache.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import pairwise

MB = 1 << 20
ROUND, SMALL, ADDRESSES = 512, MB, 1 << 60
USED, FREE, UNMAPPED = "used", "free", "unmapped"


@dataclass(eq=False)
class Block:
    """A stretch of a segment, and its neighbours there."""

    segment: "Segment"
    address: int
    size: int
    state: str
    before: "Block | None" = None
    after: "Block | None" = None


class Segment:
    """The blocks of one pool. ``free`` is sorted by size, and ``unmapped`` by address."""

    def __init__(self, page: int) -> None:
        self.page, self.reserved = page, 0
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []
        self.enter(Block(self, 0, ADDRESSES, UNMAPPED), UNMAPPED)

    def enter(self, block: Block, state: str) -> None:
        """Give a block a state, and join it with neighbours in the same state."""
        block.state = state
        if (other := block.before) is not None and other.state == state:
            self.leave(other)
            block.address, block.size, block.before = other.address, block.size + other.size, other.before
            if other.before is not None:
                other.before.after = block
        if (other := block.after) is not None and other.state == state:
            self.leave(other)
            block.size, block.after = block.size + other.size, other.after
            if other.after is not None:
                other.after.before = block
        if state == FREE:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def leave(self, block: Block) -> None:
        if block.state == FREE:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]
        block.state = USED

    def split(self, block: Block, size: int, state: str) -> None:
        """Cut a used block to a size, and give the rest this state."""
        if block.size > size:
            rest = Block(self, block.address + size, block.size - size, state, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self.enter(rest, state)

    def fitting(self, size: int) -> Block | None:
        """The free block to take. One that can grow counts with its address space, so it is taken last."""
        position = bisect_left(self.free, (size, -1))
        fits = [block for _, _, block in self.free[position:]]
        for block, larger in pairwise(fits):
            if reach(larger) >= reach(block):
                return block
        return fits[-1] if fits else None

    def grown(self, size: int) -> Block:
        """A free block of at least this size, at the lowest address where memory can be mapped for it."""
        for _, block in self.unmapped:
            start = block.before if block.before is not None and block.before.state == FREE else block
            room, end = 0, start
            while end is not None and end.state != USED and room < size:
                room, end = room + end.size, end.after
            if room >= size:
                break
        while start.state == UNMAPPED or start.size < size:
            hole = start if start.state == UNMAPPED else start.after
            missing = size if hole is start else size - start.size
            start = self.map(hole, min(missing, hole.size))
        return start

    def map(self, block: Block, size: int) -> Block:
        self.leave(block)
        size = -(-size // self.page) * self.page
        self.split(block, size, UNMAPPED)
        self.reserved += size
        self.enter(block, FREE)
        return block

    def empty(self) -> None:
        for _, _, block in list(self.free):
            start = -(-block.address // self.page) * self.page
            end = (block.address + block.size) // self.page * self.page
            if start < end:
                # The block's ends share their pages with other blocks.
                self.leave(block)
                self.split(block, end - block.address, FREE)
                if start > block.address:
                    self.split(block, start - block.address, UNMAPPED)
                    self.enter(block, FREE)
                else:
                    self.enter(block, UNMAPPED)
                self.reserved -= end - start


def reach(block: Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)


@dataclass
class Allocator:
    """``reserved``: bytes that the GPU has given."""

    _segments: dict[tuple[bool, int], Segment] = field(default_factory=dict)

    @property
    def reserved(self) -> int:
        return sum(segment.reserved for segment in self._segments.values())

    def take(self, size: int, stream: int = 0) -> Block:
        size = max(ROUND, -(-size // ROUND) * ROUND)
        small = size <= SMALL
        if (segment := self._segments.get((small, stream))) is None:
            segment = self._segments[small, stream] = Segment(2 * MB if small else 20 * MB)
        block = segment.fitting(size) or segment.grown(size)
        segment.leave(block)
        segment.split(block, size, FREE)
        return block

    def give(self, block: Block) -> None:
        block.segment.enter(block, FREE)

    def empty(self) -> None:
        """``torch.cuda.empty_cache()``: pages of which nothing is in use go back to the GPU."""
        for segment in self._segments.values():
            segment.empty()
