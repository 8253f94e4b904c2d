"""The ways of packed attention, each against plain attention with a mask, and against TRL's own method."""

from __future__ import annotations

import math
from types import SimpleNamespace

import flash_reference
import pytest
import torch
from small_families import compared, tiny_model
from small_trainers import make, padded_batch, relative
from transformers import modeling_flash_attention_utils as flash
from trl import GRPOTrainer

from grpo_math.trainer import attention, varlen
from grpo_math.trainer.attention import Unpackable, packed_attention
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.packing import GroupLayout
from grpo_math.trainer.trainer import MathGRPOTrainer
from grpo_math.trainer.varlen import AttentionParams

# Groups of one and of several, without a prompt's tokens, of one token, and a prompt longer than all else.
GROUPS = (GroupLayout(0, 5, (3, 7, 1)), GroupLayout(16, 0, (4,)), GroupLayout(20, 1, (2, 2)), GroupLayout(25, 13, (6,)))
TOKENS, HEADS, KEY_HEADS, SIZE = 44, 6, 2, 8
PLAIN = AttentionParams()


def states(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(TOKENS, heads, SIZE, generator=generator, dtype=dtype).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def plainly(q, k, v, scores=PLAIN):
    """One dense mask over the whole row."""
    mask = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    distance = torch.zeros(TOKENS, TOKENS)
    for group in GROUPS:
        first = group.start + group.prompt
        for start, length in [(group.start, group.prompt), *starts_of(first, group.lengths)]:
            own = slice(start, start + length)
            mask[own, own] = True
            distance[own, own] = torch.arange(length)[:, None] - torch.arange(length)
            if start >= first:
                prompt = slice(group.start, first)
                mask[own, prompt] = True
                distance[own, prompt] = group.prompt + torch.arange(length)[:, None] - torch.arange(group.prompt)
    mask &= (distance >= 0) & (distance < (scores.window or TOKENS))
    k, v = (heads.repeat_interleave(HEADS // KEY_HEADS, dim=1) for heads in (k, v))
    q, k, v = (heads.transpose(0, 1) for heads in (q, k, v))
    products = q @ k.transpose(1, 2) * (1 / math.sqrt(SIZE) if scores.scale is None else scores.scale)
    if scores.softcap:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    products = products.masked_fill(~mask, -math.inf)
    if scores.sinks is None:
        return (products.softmax(-1) @ v).transpose(0, 1)
    total = torch.logaddexp(products.logsumexp(-1), scores.sinks[:, None])
    return ((products - total[..., None]).exp() @ v).transpose(0, 1)


def starts_of(first, lengths):
    return [(first + sum(lengths[:i]), length) for i, length in enumerate(lengths)]


@pytest.fixture
def torchs_kernel(monkeypatch):
    """torch's varlen kernel, as if this CPU had it."""
    flash_reference.register()
    monkeypatch.setattr(varlen, "flash_takes", lambda *states: True)


def attend(q, k, v, scores):
    """By the kernel that is there."""
    return varlen.attend(q, k, v, GROUPS, scores, varlen.kernel(q, k, v, scores))


def close(way, scores=PLAIN, dtype=torch.float64):
    """Output and gradients of all three, to the rounding of the dtype."""
    inputs = states(dtype)
    grad = torch.randn(TOKENS, HEADS, SIZE, generator=torch.Generator().manual_seed(1), dtype=dtype)
    results = [(out, *torch.autograd.grad(out, inputs, grad)) for out in (way(*inputs), plainly(*inputs, scores))]
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() < 100 * torch.finfo(dtype).eps * theirs.abs().max().clamp(min=1)


SCORES = {
    "as they are": AttentionParams(),
    "scaled": AttentionParams(scale=0.3),
    "window": AttentionParams(window=4),
    "window of one": AttentionParams(window=1),
    "capped": AttentionParams(softcap=0.5),
    "capped, scaled, in a window": AttentionParams(scale=0.9, softcap=2.0, window=3),
    "a sink in a window": AttentionParams(window=3, sinks=torch.linspace(-2, 2, HEADS, dtype=torch.float64)),
}


@pytest.mark.parametrize("case", SCORES)
def test_sequences_one_by_one_give_the_same(case):
    close(lambda q, k, v: attend(q, k, v, SCORES[case]), SCORES[case])


@pytest.mark.parametrize("case", [case for case, scores in SCORES.items() if not scores.needs_eager])
def test_one_call_of_torchs_varlen_kernel_gives_the_same(case, torchs_kernel):
    assert varlen.kernel(*states(), SCORES[case]) is varlen.of_torch
    close(lambda q, k, v: attend(q, k, v, SCORES[case]), SCORES[case])


def test_flash_attn_that_the_model_was_loaded_with_goes_first(torchs_kernel, monkeypatch):
    """A stand-in for flash-attn 2, which needs a GPU: its arguments are held, and what it is asked to leave out."""
    asked = []

    def flash_attn_varlen_func(q, k, v, dropout_p=0.0, softcap=0.0, window_size=(-1, -1), **rest):
        given = {"dropout_p": dropout_p, "softcap": softcap, "window_size": window_size}
        asked.append({name: value for name, value in given.items() if value and value != (-1, -1)})
        return flash_reference.flash_attn_varlen_func(q, k, v, window_size=window_size, **rest)

    monkeypatch.setattr(flash, "_flash_varlen_fn", flash_attn_varlen_func)
    with torch.no_grad():
        attend(*states(), AttentionParams(dropout=0.1, softcap=30.0))
        for case in ("as they are", "scaled", "window"):
            out = attend(*states(), SCORES[case])
            assert torch.allclose(out, plainly(*states(), SCORES[case]))
    left = SCORES["window"].window - 1
    assert asked == [{"dropout_p": 0.1, "softcap": 30.0}, {}, {}, {"window_size": (left, 0)}]


@pytest.fixture
def flash_attention_2(torchs_kernel, monkeypatch):
    """flash-attn 2 as transformers has it once a model was loaded with it: a stand-in, which needs no GPU."""
    monkeypatch.setattr(
        flash,
        "_lazy_imports",
        lambda *asked, **more: (
            flash_reference.flash_attn_func,
            flash_reference.flash_attn_varlen_func,
            None,
            flash._pad_input,
            flash._unpad_input,
        ),
    )
    for name in ("_flash_fn", "_flash_varlen_fn", "_loaded_implementation"):
        monkeypatch.setattr(flash, name, None)
    flash.lazy_import_flash_attention("flash_attention_2")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_model_with_flash_attention_is_packed_with_it(family, tokenizer, tmp_path, flash_attention_2, monkeypatch):
    model = tiny_model(family)  # of mistral, with a window
    model.config._attn_implementation = "flash_attention_2"
    monkeypatch.setattr(attention, "kernels_used", set())
    is_packed, logps, gradient = compared(model, tokenizer, tmp_path)
    assert is_packed
    assert logps < 1e-4
    assert gradient < 1e-5
    assert attention.kernels_used == {"flash-attn's varlen kernel, one call a layer"}
    assert model.config._attn_implementation == "flash_attention_2"
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False).shape[1] > 3


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_dropout_is_not_dropped(softcap):
    """Of values that are all one, the output is one, unless weights are left out."""
    q, k, v = states()
    whole, thinned = (
        attend(q, k, torch.ones_like(v), AttentionParams(dropout=dropped, softcap=softcap)) for dropped in (0.0, 0.5)
    )
    assert torch.allclose(whole, torch.ones_like(whole))
    assert 0.3 < (thinned.mean(-1) - 1).abs().gt(1e-3).double().mean() <= 1


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_given_scaling_and_dropout_reach_the_kernel(dropout, monkeypatch):
    seen = []
    monkeypatch.setattr(varlen, "attend", lambda q, k, v, groups, scores, run: seen.append(scores) or q)
    q, k, v = (one.detach().transpose(0, 1)[None] for one in states())
    packed_attention(torch.nn.Module(), q, k, v, None, scaling=0.3, dropout=dropout, packed_groups=GROUPS)
    assert seen == [AttentionParams(0.3, dropout)]


def test_a_window_that_no_row_reaches_is_none(monkeypatch):
    seen = []
    monkeypatch.setattr(varlen, "attend", lambda q, k, v, groups, scores, run: seen.append(scores.window) or q)
    q, k, v = (one.detach().transpose(0, 1)[None] for one in states())
    for window in (19, 18):
        module = torch.nn.Module()
        module.config = SimpleNamespace(sliding_window=window)
        packed_attention(module, q, k, v, None, sliding_window=window, packed_groups=GROUPS)
    assert seen == [None, 18]


def test_a_mask_that_a_layer_has_made_is_not_ignored():
    q, k, v = (one.detach().transpose(0, 1)[None] for one in states())
    packed_attention(torch.nn.Module(), q, k, v, torch.zeros(1, 1, 1, 1, dtype=torch.bool), packed_groups=GROUPS)
    with pytest.raises(Unpackable, match="a mask of its own"):
        packed_attention(torch.nn.Module(), q, k, v, torch.zeros(1, 1, TOKENS, TOKENS), packed_groups=GROUPS)


@pytest.mark.parametrize(
    ("config", "given", "reason"),
    [
        ({"sliding_window": 8}, {}, "a sliding window that its attention is not told"),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, {"sliding_window": 8}, "a sliding window"),
        ({"attn_logit_softcapping": 50.0}, {}, "a cap of the scores"),
        ({}, {"softcap": 50.0}, "a cap of the scores"),
    ],
)
def test_a_layer_whose_window_or_cap_is_not_what_its_config_says_is_refused(config, given, reason):
    q, k, v = (one.detach().transpose(0, 1)[None] for one in states())
    module = torch.nn.Module()
    module.config, module.layer_idx = SimpleNamespace(**config), 0
    with pytest.raises(Unpackable, match=reason):
        packed_attention(module, q, k, v, None, packed_groups=GROUPS, **given)


SHAPES = {
    "one group": ([7], 4, [5, 3, 9, 1]),
    "many groups, padded": ([7, 3, 12], 4, [5, 3, 9, 1]),
    "one-token prompts and empty completions": ([1, 6], 4, [4, 0, 7]),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_torchs_kernel_gives_trls_log_probs_and_gradients(shape, torchs_kernel, tiny, tokenizer, tmp_path):
    """As `test_equivalence.py` holds the way that a CPU takes."""
    trainer = make(MathGRPOTrainer, MathGRPOConfig, tiny("llama"), tokenizer, tmp_path)
    ids, mask, longest = padded_batch(*SHAPES[shape])
    results = []
    for kind in (GRPOTrainer, MathGRPOTrainer):
        trainer.model.zero_grad()
        logps, _, _ = kind._get_per_token_logps_and_entropies(trainer, trainer.model, ids, mask, longest)
        logps = logps * mask[:, -longest:]
        logps.sum().backward()
        results.append((logps.detach(), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])))
    (plain_logps, plain_gradient), (logps, gradient) = results
    torch.testing.assert_close(logps, plain_logps, atol=1e-4, rtol=0)
    assert relative(gradient, plain_gradient) < 1e-5
