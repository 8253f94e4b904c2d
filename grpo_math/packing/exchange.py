"""Move rows between ranks: each rank sends only the rows that another rank computes.

plan.py decides which rank computes a row.
"""

from collections.abc import Sequence
from typing import Any

from torch import distributed

from grpo_math.algorithm.rows import Rows, is_per_row, join, padded, select


def gather_needed_rows(
    rows: Rows, needed: Sequence[Sequence[int]], columns: dict[str, int], accelerator: Any
) -> tuple[Rows, dict[int, int]]:
    """Send this rank's rows to the ranks that need them, and receive the rows that it needs. All ranks call this.

    Rows are numbered over all ranks, each of which has equally many. ``needed`` has the numbers of each rank's rows,
    ``columns`` the largest width of each tensor on any rank. Return the rows of this rank, and the position of each
    number in them.
    """
    size, this = len(rows["advantages"]), accelerator.process_index
    by_source = [[row for row in needed[this] if row // size == rank] for rank in range(len(needed))]
    rows = padded(rows, columns)
    parts = [select(rows, [row % size for row in by_source[this]])]
    operations = []
    for rank, mine in enumerate(by_source):
        if rank == this:
            continue
        theirs = [row % size for row in needed[rank] if row // size == this]
        sent = select(rows, theirs)
        received = dict(rows)
        for name, value in sent.items():
            if is_per_row(value):
                received[name] = value.new_empty(len(mine), *value.shape[1:])
                if theirs:
                    operations.append(distributed.P2POp(distributed.isend, value.contiguous(), rank))
                if mine:
                    operations.append(distributed.P2POp(distributed.irecv, received[name], rank))
        parts.append(received)
    if operations:
        for work in distributed.batch_isend_irecv(operations):
            work.wait()
    order = [*by_source[this], *(row for rank, part in enumerate(by_source) if rank != this for row in part)]
    return join(parts), {row: position for position, row in enumerate(order)}
