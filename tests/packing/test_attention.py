"""The ways of packed attention, each against plain attention with a mask, and against TRL's own method."""

import math
from collections import Counter
from types import SimpleNamespace

import flash_reference
import pytest
import torch
from small_families import compared, tiny_model, try_first
from transformers import modeling_flash_attention_utils as flash

from grpo_math.packing import attention, varlen
from grpo_math.packing.attention import Unpackable, packed_attention
from grpo_math.packing.pack import GroupLayout
from grpo_math.packing.varlen import AttentionParams

# Groups of one and of several, without a prompt's tokens, of one token, and a prompt longer than all else.
GROUPS = (GroupLayout(0, 5, (3, 7, 1)), GroupLayout(16, 0, (4,)), GroupLayout(20, 1, (2, 2)), GroupLayout(25, 13, (6,)))
TOKENS, HEADS, KEY_HEADS, SIZE = 44, 6, 2, 8


def states():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(TOKENS, heads, SIZE, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def plainly(q, k, v, scores):
    """One dense mask over the whole row."""
    tokens = [
        (number, segment, position)
        for number, group in enumerate(GROUPS)
        for segment, (first, length) in enumerate([(0, group.prompt), *((group.prompt, n) for n in group.lengths)])
        for position in range(first, first + length)
    ]
    group, segment, position = torch.tensor(tokens).T
    distance = position[:, None] - position
    mask = (group[:, None] == group) & ((segment == 0) | (segment[:, None] == segment))
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


@pytest.fixture
def torchs_kernel(monkeypatch):
    """torch's varlen kernel, as if this CPU had it."""
    flash_reference.register()
    monkeypatch.setattr(varlen, "flash_takes", lambda *states: True)


def attend(q, k, v, scores):
    """By the kernel that is there."""
    return varlen.attend(q, k, v, GROUPS, scores, varlen.kernel(q, k, v, scores))


def close(way, scores):
    """Output and gradients of all three, to rounding."""
    inputs = states()
    grad = torch.randn(TOKENS, HEADS, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = [(out, *torch.autograd.grad(out, inputs, grad)) for out in (way(*inputs), plainly(*inputs, scores))]
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() < 100 * torch.finfo(torch.float64).eps * theirs.abs().max().clamp(min=1)


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
def test_sequences_one_by_one_give_the_same(case, caplog):
    close(lambda q, k, v: attend(q, k, v, SCORES[case]), SCORES[case])
    assert not caplog.messages, "without a GPU nothing is switched off"


@pytest.mark.parametrize("case", [case for case, scores in SCORES.items() if not scores.needs_eager])
def test_one_call_of_torchs_varlen_kernel_gives_the_same(case, torchs_kernel):
    assert varlen.kernel(*states(), SCORES[case]) is varlen.attend_with_torch
    close(lambda q, k, v: attend(q, k, v, SCORES[case]), SCORES[case])


def test_torchs_varlen_kernel_needs_no_flag_for_grouped_heads(torchs_kernel, monkeypatch):
    def before_213(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
        return flash_reference.flash_attn_varlen_func(
            q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, softmax_scale=scale, window_size=window_size
        )

    monkeypatch.setattr(varlen, "varlen_attn", before_213)
    close(lambda q, k, v: attend(q, k, v, AttentionParams()), AttentionParams())


def test_flash_attn_that_the_model_was_loaded_with_goes_first(torchs_kernel, monkeypatch):
    """A stand-in for flash-attn 2, which needs a GPU: what it is asked to leave out is held."""
    asked = []

    def flash_attn_varlen_func(q, k, v, dropout_p=0.0, softcap=0.0, window_size=(-1, -1), **others):
        asked.append((dropout_p, softcap))
        return flash_reference.flash_attn_varlen_func(q, k, v, window_size=window_size, **others)

    monkeypatch.setattr(flash, "_flash_varlen_fn", flash_attn_varlen_func)
    attend(*states(), AttentionParams(dropout=0.1, softcap=30.0))
    for case in ("as they are", "scaled", "window"):
        close(lambda q, k, v, scores=SCORES[case]: attend(q, k, v, scores), SCORES[case])
    assert asked == [(0.1, 30.0), *[(0.0, 0.0)] * 3]


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


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_model_with_flash_attention_is_packed_with_it(family, ours, flash_attention_2, monkeypatch):
    model = tiny_model(family)  # of mistral, with a window
    model.config._attn_implementation = "flash_attention_2"
    attention.kernels_used.clear()
    trainer = ours(model=model)
    try_first(trainer)
    logps, gradient = compared(trainer)
    assert trainer.grpo_math.scorer.packed is not None
    assert logps < 1e-4
    assert gradient < 1e-5
    assert attention.kernels_used == {"flash-attn's varlen kernel, one call per layer"}
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


def eager_attention_forward(*arguments, scaling, **others):
    return scaling


def test_rows_that_are_not_packed_have_the_eager_attention_of_the_models_own_file():
    class Layer(torch.nn.Module):
        config = SimpleNamespace(_attn_implementation=attention.EAGER)

    assert packed_attention(Layer(), *states(), None, scaling=0.3) == 0.3


def packed(config=None, mask=None, **given):
    """What `packed_attention` makes of these arguments, in the first layer of a model with this config."""
    module = torch.nn.Module()
    module.config, module.layer_idx = SimpleNamespace(**config or {}), 0
    q, k, v = (one.detach().transpose(0, 1)[None] for one in states())
    return packed_attention(module, q, k, v, mask, packed_groups=GROUPS, **given)


PLAIN, SINKS = AttentionParams(), torch.linspace(-2, 2, HEADS, dtype=torch.float64)
WINDOW = {"sliding_window": 18, "layer_types": ["sliding_attention"]}


@pytest.mark.parametrize(
    ("config", "given", "scores"),
    [
        ({}, {"mask": torch.zeros(1, 1, 1, 1), "position_ids": torch.arange(TOKENS)[None], "use_cache": False}, PLAIN),
        ({}, {"scaling": 0.3, "dropout": 0.5}, AttentionParams(0.3, 0.5)),
        ({"sliding_window": 19}, {"sliding_window": 19}, PLAIN),
        (WINDOW, {"sliding_window": 18}, AttentionParams(window=18)),
        ({"sliding_window": 4, "use_sliding_window": False}, {}, PLAIN),
        ({"_attn_implementation": "packed_eager"}, {"s_aux": SINKS}, AttentionParams(sinks=SINKS)),
    ],
)
def test_scaling_dropout_and_a_window_that_some_row_reaches_get_to_the_kernel(config, given, scores):
    calls = Counter()
    torch.manual_seed(0)
    output, _ = packed(config, packed_calls=calls, **given)
    torch.manual_seed(0)
    assert torch.equal(output[0], attend(*states(), scores))
    assert calls == {"attention": 1}


@pytest.mark.parametrize(
    ("config", "given", "reason"),
    [
        ({}, {"position_bias": 8}, "attention with 'position_bias'"),
        ({}, {"s_aux": 8}, "attention with 's_aux'"),
        ({}, {"is_causal": False}, "not causal"),
        ({}, {"mask": torch.zeros(1, 1, TOKENS, TOKENS)}, "its own mask"),
        ({"sliding_window": 8}, {}, "attention whose sliding window differs from the config's"),
        (
            {"sliding_window": 8, "layer_types": ["full_attention"]},
            {"sliding_window": 8},
            "whose sliding window differs",
        ),
        ({"attn_logit_softcapping": 50.0}, {}, "whose softcap differs"),
        ({}, {"softcap": 50.0}, "whose softcap differs"),
    ],
)
def test_what_would_change_the_scores_without_an_error_is_refused_by_name(config, given, reason):
    with pytest.raises(Unpackable, match=reason):
        packed(config, **given)
