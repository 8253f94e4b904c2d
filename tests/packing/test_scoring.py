"""A model that computes a position differently in a longer pass is packed for short rows, or not at all."""

import pytest
import torch
from small_families import tiny_model
from small_trainers import KINDS, SMALL, STEPS, relative, weights
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
    trainer.grpo_math.scorer.agree_to_pack()
    return trainer.grpo_math.scorer.packed is not None


def model_of(kind, limit):
    """A model whose RoPE has other frequencies in passes of more than ``limit`` tokens, if the kind allows that."""
    settings = {"max_position_embeddings": limit if kind == "dynamic" else 128}
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **TYPES[kind]}
    if "original_max_position_embeddings" in parameters:
        parameters["original_max_position_embeddings"] = limit
    return tiny_model("llama", rope_parameters=parameters, **settings)


@pytest.mark.parametrize("kind", TYPES)
def test_trying_a_rope_leaves_its_frequencies(kind, ours):
    model = model_of(kind, 24)
    inv_freq = model.model.rotary_emb.inv_freq.clone()
    trainer = ours(model=model)
    assert packs(trainer)
    assert trainer.grpo_math.scorer.packed.longest == (24 if kind in ("dynamic", "longrope") else None)
    assert torch.equal(model.model.rotary_emb.inv_freq, inv_freq)


# Each rollout is wider than the first limit, some are wider than the second, and none is wider than the third.
@pytest.mark.parametrize("limit", [12, 20, 64])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_that_reads_the_length_of_a_pass_is_packed_only_if_all_rows_are_short(kind, limit, ours, tmp_path):
    folder, trained, packed = str(tmp_path / "model"), {}, []
    model_of(kind, limit).save_pretrained(folder)
    for name in ("ours", "trl"):
        trainer = ours(model=folder, folder=name, **KINDS[name], **STEPS, **SMALL, beta=0.1)
        hook = trainer.model.register_forward_pre_hook(
            lambda model, args, kwargs: packed.append("packed_groups" in kwargs and torch.is_grad_enabled()),
            with_kwargs=True,
        )
        trainer.train()
        hook.remove()
        trained[name] = weights(trainer.model)
    assert relative(trained["ours"], trained["trl"]) < 1e-6
    assert any(packed) == (limit > 12)


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
