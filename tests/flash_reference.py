"""What torch's flash kernels for sequences of unequal length compute, in plain torch, for CPU tensors of any dtype.

`register` puts them where CUDA's would be: ``torch.nn.attention.varlen.varlen_attn`` then runs on a CPU, with torch's
own autograd around it.

Does not drop out, and takes no pages of keys.
"""

import math
from functools import cache
from inspect import signature

import torch


def _heads(states, heads):
    """(L, H_kv, D) -> (H, L, D) in float32 at least, each head as often as there are query heads to it."""
    wide = torch.promote_types(states.dtype, torch.float32)
    return states.repeat_interleave(heads // states.size(1), dim=1).transpose(0, 1).to(wide)


def _probabilities(q, k, at_q, at_k, scale, left, right, lse=None):
    """Over the keys of its own sequence that a query sees: softmax, or with a given log-sum-exp; and that."""
    assert right == 0
    of_q, of_k = (torch.arange(len(at) - 1).repeat_interleave(at.diff()) for at in (at_q, at_k))
    # Sequences are aligned at their ends.
    from_q, from_k = (torch.arange(len(of)) - at[1:][of] for of, at in ((of_q, at_q), (of_k, at_k)))
    distance = from_q[:, None] - from_k
    seen = (of_q[:, None] == of_k) & (distance >= 0) & (distance <= (left if left >= 0 else len(of_k)))
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1) if lse is None else lse
    return (scores - lse[..., None]).exp(), lse


def forward(
    q, k, v, at_q, at_k, max_q, max_k, dropout, causal, debug, *, scale=None, window_size_left, window_size_right,
    **unused
):  # fmt: skip
    assert not dropout
    assert max_q >= at_q.diff().max()
    queries, keys, values = (_heads(states, q.size(1)) for states in (q, k, v))
    scale = scale or 1 / math.sqrt(q.size(-1))
    p, lse = _probabilities(queries, keys, at_q, at_k, scale, window_size_left, window_size_right)
    out = (p @ values).transpose(0, 1).to(q.dtype).contiguous()
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def backward(
    grad, q, k, v, out, lse, at_q, at_k, max_q, max_k, dropout, causal, rng_state, unused, *, scale=None,
    window_size_left, window_size_right
):  # fmt: skip
    """From the given output and log-sum-exp, as flash does: nothing of the forward pass is computed again."""
    queries, keys, values, o, g = (_heads(states, q.size(1)) for states in (q, k, v, out, grad))
    scale = scale or 1 / math.sqrt(q.size(-1))
    p, _ = _probabilities(queries, keys, at_q, at_k, scale, window_size_left, window_size_right, lse)
    of_scores = p * (g @ values.transpose(1, 2) - (g * o).sum(-1, keepdim=True)) * scale
    of_q, of_k, of_v = of_scores @ keys, of_scores.transpose(1, 2) @ queries, p.transpose(1, 2) @ g
    # The gradients of a key's heads are added up.
    of_k, of_v = (of.unflatten(0, (k.size(1), -1)).sum(1) for of in (of_k, of_v))
    return tuple(of.transpose(0, 1).to(q.dtype).contiguous() for of in (of_q, of_k, of_v))


@cache
def register() -> torch.library.Library:
    """For good, in this process: the CPU has no kernels of that name."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    return library


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0
):  # fmt: skip
    """flash-attn 2's, after `register`. Caps no scores."""
    from torch.nn.attention.varlen import varlen_attn

    assert not dropout_p
    assert not softcap
    offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = (window_size[0], 0) if causal else window_size
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    return varlen_attn(q, k, v, *offsets, scale=softmax_scale, window_size=window, **grouped)


def flash_attn_func(q, k, v, **settings):
    """Of a batch (B, L, H, D), as sequences of one length."""
    rows, length = q.shape[:2]
    at_q, at_k = (torch.arange(rows + 1, dtype=torch.int32) * states.size(1) for states in (q, k))
    flat = (states.flatten(0, 1) for states in (q, k, v))
    return flash_attn_varlen_func(*flat, at_q, at_k, length, k.size(1), **settings).unflatten(0, (rows, length))
