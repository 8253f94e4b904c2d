"""A model that computes a position differently in a longer pass is not packed, however it does that."""

import pytest
import torch
from small_families import tiny_model
from torch import nn

LLAMA = {"rope_theta": 10000.0, "factor": 4.0}
LONG = {"original_max_position_embeddings": 24, "short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 16.0, 32.0]}
TYPES = {
    "default": {},
    "linear": LLAMA,
    "yarn": LLAMA | {"original_max_position_embeddings": 24},
    "dynamic": LLAMA,
    "longrope": LLAMA | LONG,
}


def packs(trainer):
    trainer._agree_to_pack()
    return trainer.scorer is not None


@pytest.mark.parametrize("kind", TYPES)
def test_a_rope_that_reads_the_length_of_a_pass_is_not_packed(kind, ours, caplog):
    model = tiny_model("llama", rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **TYPES[kind]})
    inv_freq = model.model.rotary_emb.inv_freq.clone()
    assert packs(ours(model=model)) == (kind not in ("dynamic", "longrope"))
    assert ("positions that depend on the longest row" in caplog.text) == (kind in ("dynamic", "longrope"))
    assert torch.equal(model.model.rotary_emb.inv_freq, inv_freq)


class OwnRope(nn.Module):
    """A user's: frequencies of their own for each layer, lower if the pass is longer than ``limit``."""

    def __init__(self, rope, limit, trained=False):
        super().__init__()
        self.rope, self.limit = rope, limit
        if trained:  # then it is not taken for a module that computes positions alone
            self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, position_ids, **kwargs):
        return self.rope(x, position_ids * (1.0 if position_ids.max() < self.limit else 0.5), **kwargs)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_users_own_rope_is_tried_too(dtype, trained, ours):
    model = tiny_model("llama").to(dtype)
    model.model.rotary_emb = OwnRope(model.model.rotary_emb, limit=100, trained=trained)
    assert not packs(ours(model=model))
    model.model.rotary_emb.limit = 2**30
    assert packs(ours(model=model))
