"""Layers with a state continue a prompt's state, whichever way their version of transformers reads the cache."""

from collections import Counter

import pytest
import torch
from torch import nn

from grpo_math.packing import recurrent
from grpo_math.packing.pack import GroupLayout, Unpackable


class Sums(nn.Module):
    """A running sum, which reads the cache as the layers of transformers 5.17 do."""

    def forward(self, states, cache_params=None):
        if cache_params is None:
            return states.cumsum(1)
        before = cache_params.layers[0].recurrent_states[0] if cache_params.has_previous_state(0) else 0.0
        assert cache_params.layers[0].record_past
        cache_params.update_conv_state(states.transpose(1, 2), 0, conv_kernel_size=2)
        sums = states.cumsum(1) + before
        cache_params.update_recurrent_state(sums[:, -1:], 0)
        return sums


def test_a_layer_that_reads_the_attributes_of_its_cache_continues_a_prompt():
    model = nn.Sequential(Sums())
    recurrent.fork_states(model)
    row = torch.arange(1.0, 7.0).view(1, -1, 1)
    calls = Counter()
    packed = model[0].forward(row, packed_groups=(GroupLayout(0, 2, (3, 1)),), packed_calls=calls)
    assert packed.flatten().tolist() == [1, 3, 6, 10, 15, 9]
    assert calls == {"states": 1}


class RenamedSums(nn.Module):
    """The same layer with the name of transformers 5.24, which reads the cache as in 5.23."""

    def forward(self, hidden_states, cache=None):
        sums = hidden_states.cumsum(1)
        if cache is not None:
            before = cache.get_recurrent_state(0, state_idx=0)
            sums = sums if before is None else sums + before
            assert cache.is_recording_past(0)
            assert len(sums[0]) > 1, "a layer may change its state in place"
            cache.update_conv_state(hidden_states.transpose(1, 2), 0)
            cache.update_recurrent_state(sums[:, -1:], 0)
        return sums


def test_the_cache_of_a_layer_may_have_the_name_of_transformers_5_24():
    model = nn.Sequential(RenamedSums())
    recurrent.fork_states(model)
    recurrent.fork_states(model)  # changes nothing
    row = torch.arange(1.0, 7.0).view(1, -1, 1)
    assert model[0].forward(row, cache=None).flatten().tolist() == [1, 3, 6, 10, 15, 21]
    for lengths, sums in (((3, 1), [1, 3, 6, 10, 15, 9]), ((1, 1, 1, 1), [1, 3, 6, 7, 8, 9])):
        packed = model[0].forward(hidden_states=row, packed_groups=(GroupLayout(0, 2, lengths),))
        assert packed.flatten().tolist() == sums
    with pytest.raises(Unpackable, match=r"layers \(RenamedSums\) whose code ignores how a row is packed"):
        model[0].forward(row, attention_mask=torch.zeros(1, 1, 1, 1))


def test_the_cache_keeps_the_last_inputs_of_each_convolution_of_a_layer():
    states, inputs = recurrent.States(), torch.tensor([[[1.0, 2.0, 3.0]]])
    assert states.get_conv_state(0) is None
    assert torch.equal(states.update_conv_state(inputs, 0, conv_kernel_size=2), inputs)
    assert states.update_conv_state(inputs[..., :1], 0, conv_kernel_size=2).tolist() == [[[2, 3, 1]]]
    assert states.get_conv_state(0).tolist() == [[[3, 1]]]
    assert (states.has_previous_state(0), states.has_previous_state(0, state_idx=1)) == (True, False)
    # A kernel longer than the inputs gets zeros in front. Without a kernel size, all inputs are kept.
    for size, kept in ((5, [0, 0, 1, 2, 3]), (None, [1, 2, 3])):
        states = recurrent.States()
        states.update_conv_state(inputs, 0, state_idx=1, conv_kernel_size=size)
        assert states.get_conv_state(0, state_idx=1).tolist() == [[kept]]
