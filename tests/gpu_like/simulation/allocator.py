"""What torch's caching allocator reserves of a GPU for a row of allocations: a model of c10/cuda/CUDACachingAllocator.

A request is rounded to 512 bytes and takes the smallest free block of its pool that holds it; there is a pool for
requests of up to 1 MB and one for larger ones, for each stream. Where none is free, a segment is asked of the GPU: 2 MB
for small requests, 20 MB for those below 10 MB, and the request rounded to 2 MB from there. What is left of a block is
split off, in the large pool only if it is more than 1 MB. A block that is freed is joined with its free neighbours and
stays reserved.

Does not know expandable segments or the settings of PYTORCH_CUDA_ALLOC_CONF.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MB = 1 << 20
ROUND, SMALL, SMALL_SEGMENT, LARGE_SEGMENT, LARGE, LARGE_ROUND = 512, MB, 2 * MB, 20 * MB, 10 * MB, 2 * MB


@dataclass(eq=False)
class Block:
    """A stretch of a segment, and its neighbours there."""

    address: int
    size: int
    pool: tuple[bool, int]
    before: "Block | None" = None
    after: "Block | None" = None
    free: bool = False


@dataclass
class Allocator:
    """``reserved``: bytes that the GPU has given.

    >>> allocator = Allocator()
    >>> a, b = allocator.take(3 * MB), allocator.take(3 * MB)  # both from one segment of 20 MB
    >>> allocator.give(a)
    >>> c = allocator.take(16 * MB)  # 14 MB are left beside b, and 3 MB before it
    >>> allocator.reserved // MB
    36
    """

    reserved: int = 0
    _free: dict[tuple[bool, int], list[tuple[int, int, Block]]] = field(default_factory=dict)
    _next: int = 0

    def take(self, size: int, stream: int = 0) -> Block:
        size = max(ROUND, -(-size // ROUND) * ROUND)
        pool = (size <= SMALL, stream)
        free = self._free.setdefault(pool, [])
        position = bisect_left(free, (size, -1))
        block = free.pop(position)[2] if position < len(free) else self._segment(size, pool)
        block.free = False
        left = block.size - size
        if left >= ROUND if pool[0] else left > SMALL:
            others = Block(block.address + size, left, pool, block, block.after, free=True)
            if block.after is not None:
                block.after.before = others
            block.after, block.size = others, size
            insort(free, (others.size, others.address, others))
        return block

    def _segment(self, size: int, pool: tuple[bool, int]) -> Block:
        size = SMALL_SEGMENT if pool[0] else LARGE_SEGMENT if size < LARGE else -(-size // LARGE_ROUND) * LARGE_ROUND
        self.reserved += size
        block = Block(self._next, size, pool)
        self._next += size
        return block

    def give(self, block: Block) -> None:
        free = self._free[block.pool]
        block.free = True
        if (other := block.before) is not None and other.free:
            self._drop(free, other)
            block.address, block.size, block.before = other.address, block.size + other.size, other.before
            if other.before is not None:
                other.before.after = block
        if (other := block.after) is not None and other.free:
            self._drop(free, other)
            block.size, block.after = block.size + other.size, other.after
            if other.after is not None:
                other.after.before = block
        insort(free, (block.size, block.address, block))

    def empty(self) -> None:
        """``torch.cuda.empty_cache()``: segments of which nothing is in use go back to the GPU."""
        for free in self._free.values():
            for entry in [entry for entry in free if entry[2].before is None and entry[2].after is None]:
                free.remove(entry)
                self.reserved -= entry[0]

    @staticmethod
    def _drop(free: list[tuple[int, int, Block]], block: Block) -> None:
        del free[bisect_left(free, (block.size, block.address))]
