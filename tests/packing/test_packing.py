"""What is packed comes back when it is unpacked, and each prompt is in the row once."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from grpo_math.packing.pack import PaddedRows, pack, unpack

TOKENS = st.integers(1, 9)  # few, so that prompts are equal or begin alike; 0 is padding
PROMPT = st.lists(TOKENS, min_size=1, max_size=4)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(PROMPT, st.lists(TOKENS, max_size=6)), min_size=1, max_size=8))
def test_what_is_packed_is_unpacked_as_it_was_and_has_the_positions_of_its_padded_row(rows):
    prompts, completions = zip(*rows, strict=True)
    left, right = (
        pad_sequence([torch.tensor(ids, dtype=torch.long) for ids in part], batch_first=True, padding_side=side)
        for part, side in ((prompts, "left"), (completions, "right"))
    )
    ids = torch.cat([left, right], dim=1)
    mask = (ids > 0).long()
    packed = pack(PaddedRows(ids, mask, right.size(1)))
    written = {tuple(prompt) for prompt, completion in rows if completion}
    assert (packed is None) == (not written)
    if packed:
        assert packed.input_ids.numel() == sum(len(prompt) - 1 for prompt in written) + sum(map(len, completions))
        assert torch.equal(unpack(packed.shift_labels, packed), right)
        # The token before a label, and its position, are those of the padded row.
        before, places = ids[:, left.size(1) - 1 : -1], (mask.cumsum(dim=1) - 1)[:, left.size(1) - 1 : -1]
        for values, padded in ((packed.input_ids, before), (packed.position_ids, places)):
            assert torch.equal(unpack(values[:, packed.scored_index], packed), padded * (right > 0))


def test_a_prompt_is_shared_within_a_group_alone_and_only_if_it_is_equal():
    ids = torch.tensor([[5, 6, 7], [5, 6, 8], [5, 9, 7], [5, 6, 8], [7, 6, 8], [7, 6, 9]])
    mask = torch.ones_like(ids)
    groups = [layout.lengths for layout in pack(PaddedRows(ids, mask, 1, torch.tensor([2, 2, 2, 4, 5, 5]))).groups]
    assert groups == [(1, 1), (1,), (1,), (1, 1)]
    assert [layout.lengths for layout in pack(PaddedRows(ids, mask, 1)).groups] == [(1, 1, 1), (1,), (1, 1)]
