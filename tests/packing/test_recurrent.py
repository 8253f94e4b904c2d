"""Layers with a state continue a prompt's state, whichever way their version of transformers reads the cache."""

from collections import Counter

import torch
from torch import nn

from grpo_math.packing import recurrent
from grpo_math.packing.pack import GroupLayout


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
    """The same layer with the name of transformers 5.24."""

    def forward(self, hidden_states, cache=None):
        assert cache is None or cache.update_conv_state
        return Sums.forward(self, hidden_states, cache)


def test_the_cache_of_a_layer_may_have_the_name_of_transformers_5_24():
    model = nn.Sequential(RenamedSums())
    recurrent.fork_states(model)
    row = torch.arange(1.0, 7.0).view(1, -1, 1)
    assert model[0].forward(row, cache=None).flatten().tolist() == [1, 3, 6, 10, 15, 21]
    packed = model[0].forward(hidden_states=row, packed_groups=(GroupLayout(0, 2, (3, 1)),))
    assert packed.flatten().tolist() == [1, 3, 6, 10, 15, 9]
