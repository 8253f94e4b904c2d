"""A model that computes a position differently in a longer pass is packed for short rows, or not at all."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from small_families import tiny_model
from small_generation import of_library
from small_trainers import KINDS, SMALL, STEPS, relative, weights
from torch import nn
from torch.testing import assert_close

from grpo_math.packing import scoring
from grpo_math.packing.micro_batches import TokenBudget
from grpo_math.packing.pack import PaddedRows, Unpackable
from grpo_math.packing.scoring import PackedScorer

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


def model_of(kind, limit, **others):
    """A model whose RoPE has other frequencies in passes of more than ``limit`` tokens, if the kind allows that."""
    settings = {"max_position_embeddings": limit if kind == "dynamic" else 128}
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **TYPES[kind]}
    if "original_max_position_embeddings" in parameters:
        parameters["original_max_position_embeddings"] = limit
    return tiny_model("llama", rope_parameters=parameters, **settings, **others)


@pytest.mark.parametrize("kind", TYPES)
def test_trying_a_rope_leaves_its_frequencies(kind, ours):
    model = model_of(kind, 24, attention_dropout=0.5).train()
    inv_freq = model.model.rotary_emb.inv_freq.clone()
    trainer = ours(model=model)
    assert packs(trainer)
    assert trainer.grpo_math.scorer.packed.longest == (24 if kind in ("dynamic", "longrope") else None)
    assert torch.equal(model.model.rotary_emb.inv_freq, inv_freq)
    assert model.training
    assert not model._forward_pre_hooks


# Each rollout is wider than the first limit, and some are wider than the second.
@pytest.mark.parametrize(("kind", "limit"), [("dynamic", 12), ("dynamic", 20), ("longrope", 20)])
def test_a_rope_that_reads_the_length_of_a_pass_is_packed_only_if_all_rows_are_short(kind, limit, ours, tmp_path):
    folder, trained, packed = str(tmp_path / "model"), {}, []
    model_of(kind, limit).save_pretrained(folder)
    for name in ("ours", "trl"):
        trainer = ours(model=folder, folder=name, **KINDS[name], **STEPS, **SMALL, beta=0.1)
        hook = trainer.model.register_forward_pre_hook(
            of_library(
                lambda model, args, kwargs: packed.append("packed_groups" in kwargs and torch.is_grad_enabled())
            ),
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


def test_a_model_whose_layers_refuse_packed_rows_has_its_own_attention_again(ours):
    model = tiny_model("llama")
    trainer = ours(model=model)
    assert model.config._attn_implementation == "packed_sdpa"
    model.model.layers[1].self_attn.is_causal = False
    assert not packs(trainer)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_with_attention_classes_of_its_own_is_not_packed(monkeypatch, caplog):
    model = tiny_model("llama")
    monkeypatch.setattr(model, "set_attn_implementation", lambda name: None)
    args = SimpleNamespace(torch_compile=False, neftune_noise_alpha=None)
    assert not scoring.agree_to_register([model], args, {})
    assert "packing: LlamaForCausalLM has its own attention, which transformers cannot replace" in caplog.text


class Labels(nn.Module):
    """A model whose layers ignore that a row is packed. The log-prob of a token is minus its id, its entropy the id."""

    def __init__(self, layers=0):
        super().__init__()
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=layers))
        self.masks = []

    def forward(self, shift_labels, attention_mask, **kwargs):
        self.masks.append(attention_mask.flatten().tolist())
        labels = shift_labels.float()
        return SimpleNamespace(log_probs=-labels, entropy=labels, aux_loss=0.5)


def scorer_of(budget=0):
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, autocast=nullcontext)
    return PackedScorer(accelerator, TokenBudget(budget, is_single_process=True), [])


def test_a_layer_that_does_not_count_its_call_is_an_error_and_too_wide_rows_are_scored_as_trl_does():
    scorer, model = scorer_of(), Labels(layers=2)
    rows = PaddedRows(torch.ones(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long), 2)
    for scorer.longest in (None, 5):
        with pytest.raises(Unpackable, match="2 layers and 0 calls of packed attention"):
            scorer(Mock(), model, rows)
    scorer.longest = 4
    assert scorer(lambda *given, **more: "TRL's", model, rows) == "TRL's"


def test_rows_that_packing_hardly_shortens_and_rows_without_a_token_are_scored_as_trl_does_in_float32():
    ids, mask = torch.arange(80).view(2, 40), torch.ones(2, 40, dtype=torch.long)

    def scores(ids, mask):
        theirs = torch.full((len(ids), 20), 9.0, dtype=torch.bfloat16)
        return scorer_of()(lambda *rows, **others: (theirs, None, None), Labels(), PaddedRows(ids, mask, 20))[0]

    # Without a common prompt, packing leaves out 2 of 80 tokens. One row alone needs no mask if it is packed.
    assert_close(scores(ids, mask), torch.full((2, 20), 9.0))
    assert_close(scores(ids[:1], mask[:1]), -ids[:1, 20:].float())
    assert_close(scores(ids[:1], mask[:1] * (torch.arange(40) < 20)), torch.full((1, 20), 9.0))


# Two prompts of two tokens, each with a completion of two tokens and one of one.
IDS = torch.tensor([[5, 6, 1, 2], [5, 6, 3, 0], [7, 8, 4, 9], [7, 8, 1, 0]])


@pytest.mark.parametrize(("batch_size", "passes"), [(1, 2), (None, 1)])
def test_scores_of_several_batches_return_to_their_rows(batch_size, passes):
    rows, completions = PaddedRows(IDS, (IDS > 0).long(), 2, torch.tensor([3, 3, 4, 4])), IDS[:, 2:].float()
    with torch.no_grad():
        for entropy in (True, False):
            model = Labels()
            logps, entropies, aux_loss = scorer_of()(Mock(), model, rows, batch_size, entropy)
            assert len(model.masks) == passes
            assert torch.equal(logps, -completions)
            assert torch.equal(entropies, completions) if entropy else entropies is None
            assert aux_loss is None


def test_the_auxiliary_loss_counts_each_token_as_often_as_trls_rows_contain_it():
    model = Labels()
    scores = scorer_of()(Mock(), model, PaddedRows(IDS[:2], (IDS[:2] > 0).long(), 2), compute_aux_loss=True)
    assert (scores[0].tolist(), scores[2]) == ([[-1, -2], [-3, 0]], 0.5)
    assert model.masks == [[2, *[1] * 5]]  # the prompt's first token, and each completion after the prompt's last


@pytest.mark.parametrize(
    ("budget", "batch_size", "batches"),
    [(0, 2, [[0, 1], [2, 3]]), (0, None, [[0, 1, 2, 3]]), (3, 4, [[0], [1], [2], [3]])],
)
def test_rows_without_a_gradient_are_scored_in_batches_of_the_budget_or_of_trls_padded_tokens(
    budget, batch_size, batches
):
    """Two prompts of 2 tokens, each with two completions of 2: packed they are 5 tokens, and a padded row is 4."""
    ids = torch.tensor([[5, 6, 1, 1]] * 2 + [[7, 8, 1, 1]] * 2)
    assert sorted(scorer_of(budget)._agree_on_batches(PaddedRows(ids, torch.ones_like(ids), 2), batch_size)) == batches


@pytest.mark.parametrize(("precision", "exact"), [("highest", True), ("high", False), ("medium", False)])
def test_float32_in_fewer_bits_is_compared_as_half_precision(precision, exact, ours, monkeypatch):
    """Images and scripts set the precision, and the recipe's tf32 is None."""
    limits = []

    def differences(*arguments):
        limits.append(arguments[-1])
        yield None

    monkeypatch.setattr(scoring, "_differences", differences)
    trainer = ours()
    torch.set_float32_matmul_precision(precision)
    try:
        assert packs(trainer)
        assert scoring._rounds_float32(torch.device("cuda")) != exact
    finally:
        torch.set_float32_matmul_precision("highest")
    assert limits == [scoring.MAX_DIFF if exact else None]
