"""Rows that move between ranks. The exchange is a stand-in; tests/trainer/test_processes.py has real processes."""

from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from grpo_math.algorithm.rows import gather_needed_rows

# Two ranks with two rows each, of one token and of two. A row contains its number.
LOCAL = [
    {
        "prompt_ids": torch.tensor([[first], [first + 1]]),
        "completion_ids": torch.tensor([[first, 9], [first + 1, 9]])[:, :width],
        "advantages": torch.tensor([float(first), first + 1.0]),
        "num_items_in_batch": 7,
    }
    for first, width in ((0, 1), (2, 2))
]


@pytest.mark.parametrize("needed", [[[3, 0], [1, 2]], [[0, 1, 3], [2]], [[1, 0, 2, 3], []]])
def test_each_rank_gets_the_rows_that_it_needs_from_all_ranks(needed, monkeypatch):
    sent = {}

    def exchange(output, value, received, lengths):
        """Keep what each rank sends, and fill its output once both have sent."""
        calls = sent.setdefault(rank, [])
        calls.append(value.split(lengths))
        if len(sent) == 2 and all(len(of_rank) >= len(calls) for of_rank in sent.values()):
            parts = [of_rank[len(calls) - 1][rank] for of_rank in (sent[0], sent[1])]
            assert [len(part) for part in parts] == received
            output.copy_(torch.cat(parts))

    monkeypatch.setattr(distributed, "all_to_all_single", exchange)
    columns = {"prompt_ids": 1, "completion_ids": 2}
    for rank in (0, 1, 0):  # the first call of rank 0 only sends
        sent[rank] = []
        rows, positions = gather_needed_rows(LOCAL[rank], needed, columns, SimpleNamespace(process_index=rank))
        if len(sent) < 2:
            continue
        assert sorted(positions) == sorted(needed[rank])
        for number, position in positions.items():
            assert rows["advantages"][position] == rows["prompt_ids"][position, 0] == number
            assert rows["completion_ids"][position].tolist() == [number, 9 if number > 1 else 0]
        assert rows["num_items_in_batch"] == 7
        assert len(rows["advantages"]) == len(needed[rank])
