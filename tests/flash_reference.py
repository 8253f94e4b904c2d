"""What torch's flash kernels for sequences of unequal length compute, in plain torch, for CPU tensors of any dtype.

`register` puts them where CUDA's would be: ``torch.nn.attention.varlen.varlen_attn`` then runs on a CPU, with torch's
own autograd around it.

Does not drop out, and takes no pages of keys.
"""

import math
from functools import cache

import torch


def _probabilities(q, k, scale, causal, left, right, lse=None):
    """Of one sequence (H, L, D), (H, S, D): softmax over what is seen, or with a given log-sum-exp; and that."""
    scores = q @ k.transpose(1, 2) * (scale if scale is not None else 1 / math.sqrt(q.size(-1)))
    distance = torch.arange(k.size(1))[None] - torch.arange(q.size(1))[:, None] - (k.size(1) - q.size(1))
    right = 0 if causal else right
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None and left >= 0:
        hidden |= distance < -left
    if right is not None and right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1) if lse is None else lse
    return (scores - lse[..., None]).exp(), lse


def _sequences(at_queries, at_keys, q, *keys):
    """Heads first and in float32 at least, keys as often as there are query heads; a tuple a sequence."""
    ends = zip(at_queries.tolist(), at_queries[1:].tolist(), at_keys.tolist(), at_keys[1:].tolist(), strict=False)
    for a, b, c, d in ends:
        repeats = q[0].size(1) // keys[0].size(1)
        grown = (states[c:d].repeat_interleave(repeats, dim=1) for states in keys)
        pieces = (*(states[a:b] for states in q), *grown)
        wide = torch.promote_types(q[0].dtype, torch.float32)
        yield (a, b, c, d), [piece.transpose(0, 1).to(wide) for piece in pieces]


def forward(
    q, k, v, at_q, at_k, max_q, max_k, dropout, causal, debug, *, scale=None, window_size_left=None,
    window_size_right=None, **unused
):  # fmt: skip
    assert not dropout
    assert max_q >= (at_q[1:] - at_q[:-1]).max()
    out = torch.empty_like(q)
    lse = torch.empty(q.size(1), q.size(0), dtype=torch.promote_types(q.dtype, torch.float32))
    for (a, b, _, _), (queries, keys, values) in _sequences(at_q, at_k, (q,), k, v):
        p, lse[:, a:b] = _probabilities(queries, keys, scale, causal, window_size_left, window_size_right)
        out[a:b] = (p @ values).transpose(0, 1)
    nothing = torch.empty(0)
    return out, lse, torch.zeros(2, dtype=torch.uint64), nothing, nothing.clone()


def backward(
    grad, q, k, v, out, lse, at_q, at_k, max_q, max_k, dropout, causal, rng_state, unused, *, scale=None,
    window_size_left=None, window_size_right=None
):  # fmt: skip
    """From the given output and log-sum-exp, as flash does: nothing of the forward pass is computed again."""
    factor = scale if scale is not None else 1 / math.sqrt(q.size(-1))
    of_q, of_k, of_v = (torch.zeros_like(states) for states in (q, k, v))
    n = k.size(1)
    for (a, b, c, d), (queries, o, g, keys, values) in _sequences(at_q, at_k, (q, out, grad), k, v):
        p, _ = _probabilities(queries, keys, scale, causal, window_size_left, window_size_right, lse[:, a:b])
        of_scores = p * (g @ values.transpose(1, 2) - (g * o).sum(-1, keepdim=True)) * factor
        of_q[a:b] = (of_scores @ keys).transpose(0, 1)
        of_k[c:d] = (of_scores.transpose(1, 2) @ queries).unflatten(0, (n, -1)).sum(1).transpose(0, 1)
        of_v[c:d] = (p.transpose(1, 2) @ g).unflatten(0, (n, -1)).sum(1).transpose(0, 1)
    return of_q, of_k, of_v


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
    return varlen_attn(q, k, v, *offsets, scale=softmax_scale, window_size=window, enable_gqa=True)


def flash_attn_func(q, k, v, **settings):
    """Of a batch (B, L, H, D), as sequences of one length."""
    rows, length = q.shape[:2]
    at_q, at_k = (torch.arange(rows + 1, dtype=torch.int32) * states.size(1) for states in (q, k))
    flat = (states.flatten(0, 1) for states in (q, k, v))
    return flash_attn_varlen_func(*flat, at_q, at_k, length, k.size(1), **settings).unflatten(0, (rows, length))
