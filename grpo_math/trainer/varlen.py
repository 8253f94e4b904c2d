"""Attention over sequences of unequal length: one call of a varlen kernel, or one of torch's own for each sequence.

Each prompt is a sequence that sees itself; each segment is one that sees [its prompt, itself], causal from the lower
right: its last token sees all. Queries stay where they lie in the row, keys and values are gathered by an index; so one
call does a whole row, however many groups are in it.

Does not save memory on the gathered keys and values: autograd keeps them for the backward pass.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import dropout, scaled_dot_product_attention

from grpo_math.trainer.packing import GroupLayout

KEPT = 2**20  # elements: a larger mask is made anew for every layer


@dataclass(frozen=True)
class Scores:
    """What an attention makes of the products of queries and keys. ``window`` counts a query's own position; ``sinks``
    (H,) are scores of a key that has no value."""

    scale: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def spelled_out(self) -> bool:
        """Whether no kernel of torch computes them."""
        return bool(self.softcap) or self.sinks is not None


@dataclass(frozen=True)
class Spans:
    """Lengths of sequences of queries, and of the keys that each sees; the same as offsets on the device, int32."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    at_queries: Tensor  # (N + 1,)
    at_keys: Tensor


def spans(queries: list[int], keys: list[int], device: torch.device) -> Spans:
    """
    >>> spans([2, 3], [2, 5], torch.device("cpu")).at_keys
    tensor([0, 2, 7], dtype=torch.int32)
    """
    offsets = [list(accumulate(lengths, initial=0)) for lengths in (queries, keys)]
    at = torch.tensor(offsets, dtype=torch.int32).to(device, non_blocking=True)
    return Spans(tuple(queries), tuple(keys), *at.unbind())


@lru_cache(maxsize=2)  # every layer of a part asks for the same
def sequences(groups: tuple[GroupLayout, ...], device: torch.device) -> tuple[Spans, Tensor]:
    """The sequences of a row, and the index by which its keys are gathered for them.

    >>> whole, index = sequences((GroupLayout(0, 2, (3, 1)),), torch.device("cpu"))
    >>> whole.queries, whole.keys, index.tolist()
    ((2, 3, 1), (2, 5, 3), [0, 1, 0, 1, 2, 3, 4, 0, 1, 5])
    """
    queries, keys, taken = [], [], []
    for group in groups:
        prompt = torch.arange(group.start, group.start + group.prompt)
        first = group.start + group.prompt
        if group.prompt:
            queries.append(group.prompt)
            keys.append(group.prompt)
            taken.append(prompt)
        for length in group.lengths:
            queries.append(length)
            keys.append(group.prompt + length)
            taken += [prompt, torch.arange(first, first + length)]
            first += length
    return spans(queries, keys, device), torch.cat(taken).to(device, non_blocking=True)


Kernel = Callable[[Tensor, Tensor, Tensor, Spans, Scores], Tensor]


def kernel(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Kernel:
    """The kernel for tokens (L, H, D): the flash-attn that the model was loaded with, torch's, or `one_by_one`."""
    if flash_takes(q, k, v, scores.dropout):
        ours = _torchs() and not (scores.dropout or scores.spelled_out)
        if _loaded() and _knows(_loaded(), scores):
            return of_flash_attn
        if ours:
            return of_torch
    return one_by_one


def flash_takes(q: Tensor, k: Tensor, v: Tensor, dropped: float = 0.0) -> bool:
    """Whether torch's own flash kernel would take these: the device, the dtype and the size of heads are its own."""
    if q.device.type != "cuda" or torch.version.hip or q.size(-1) % 8 or q.size(-1) != v.size(-1):
        return False
    first, second, third = (states.transpose(0, 1)[None] for states in (q, k, v))
    # torch decides by device, dtype and sizes. Asking it is better than repeating its rules, which change.
    params = torch.backends.cuda.SDPAParams(first, second, third, None, dropped, True, True)
    return torch.backends.cuda.can_use_flash_attention(params)


@cache
def _torchs() -> Any:
    """`torch.nn.attention.varlen.varlen_attn` where it knows windows and grouped heads, or None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"window_size", "enable_gqa"} <= signature(varlen_attn).parameters.keys() else None


def _loaded() -> Any:
    """`flash_attn_varlen_func` of a model with ``attn_implementation: flash_attention_*``, from its package or through
    `kernels`, or None."""
    from transformers import modeling_flash_attention_utils as flash

    return flash._flash_varlen_fn


def _asked(scores: Scores) -> dict[str, Any]:
    """What not every version of flash-attn has, only where it is wanted."""
    window = _window(scores) if scores.window else None
    asked = {"dropout_p": scores.dropout, "softcap": scores.softcap, "window_size": window}
    return {name: value for name, value in asked.items() if value}


def _knows(function: Any, scores: Scores) -> bool:
    return scores.sinks is None and _asked(scores).keys() <= _parameters(function)


@cache  # every layer asks
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(signature(function).parameters)


def _window(scores: Scores) -> tuple[int, int]:
    """How far a query sees to the left and to the right, as the kernels count it; -1 is all."""
    return (scores.window - 1 if scores.window else -1, 0)


def of_torch(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scores: Scores) -> Tensor:
    offsets = (spans.at_queries, spans.at_keys, max(spans.queries), max(spans.keys))
    return _torchs()(q, k, v, *offsets, scale=scores.scale, window_size=_window(scores), enable_gqa=True)


def of_flash_attn(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scores: Scores) -> Tensor:
    function = _loaded()
    offsets = {
        "cu_seqlens_q": spans.at_queries,
        "cu_seqlens_k": spans.at_keys,
        "max_seqlen_q": max(spans.queries),
        "max_seqlen_k": max(spans.keys),
    }
    out = function(q, k, v, **offsets, softmax_scale=scores.scale, causal=True, **_asked(scores))
    return out[0] if isinstance(out, tuple) else out  # some return the log-sum-exp, too


def one_by_one(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scores: Scores) -> Tensor:
    """`scaled_dot_product_attention` for each sequence: (L, H, D) and keys, values (K, H_kv, D) -> (L, H, D)."""
    if q.device.type != "cpu" or scores.spelled_out:  # no fused kernel of CUDA takes float32 and grouped heads
        k, v = (heads.repeat_interleave(q.size(1) // heads.size(1), dim=1) for heads in (k, v))
    outputs = []
    for one in zip(q.split(spans.queries), k.split(spans.keys), v.split(spans.keys), strict=True):
        own_q, own_k, own_v = (states.transpose(0, 1)[None] for states in one)
        outputs.append(_one(own_q, own_k, own_v, scores)[0].transpose(0, 1))
    return torch.cat(outputs)


def _one(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """(1, H, L, D) in and out, causal from the lower right."""
    queries, keys = q.size(2), k.size(2)
    if scores.spelled_out:
        return _spelled_out(q, k, v, scores)
    # On a CPU no fused kernel knows "causal from the lower right", so the mask is given as a bias.
    if scores.window or (queries < keys and q.device.type == "cpu"):
        bias = _bias if queries * keys < KEPT else _bias.__wrapped__
        mask: Any = bias(queries, keys, scores.window, q.device, q.dtype)
    else:
        mask = None if queries == keys else causal_lower_right(queries, keys)
    settings: Any = {"dropout_p": scores.dropout, "scale": scores.scale, "enable_gqa": q.size(1) != k.size(1)}
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, **settings)


@lru_cache(maxsize=32)  # every layer asks for the same
def _bias(queries: int, keys: int, window: int | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`_mask` as what is added to the scores."""
    return torch.zeros((), dtype=dtype, device=device).where(_mask(queries, keys, window, device), -math.inf)


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """
    >>> _mask(2, 4, 2, torch.device("cpu")).int()
    tensor([[0, 1, 1, 0],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask.triu(keys - queries - window + 1) if window else mask


def _spelled_out(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    r"""Scores :math:`c \tanh(s / c)`, and a sink's beside them."""
    products = q @ k.transpose(2, 3) * (1 / math.sqrt(q.size(-1)) if scores.scale is None else scores.scale)
    if scores.softcap:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    products = products.masked_fill(~_mask(q.size(2), k.size(2), scores.window, q.device), -math.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.to(q.dtype).view(1, -1, 1, 1).expand(-1, -1, q.size(2), 1)
        products = torch.cat([products, sinks], dim=-1)
    # A sink takes its share of the softmax and has no value: it is cut off before the product with the values.
    weights = products.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return dropout(weights[..., : k.size(2)], scores.dropout) @ v


NAMES: dict[Kernel, str] = {
    of_torch: "torch's varlen kernel, one call a layer",
    of_flash_attn: "flash-attn's varlen kernel, one call a layer",
    one_by_one: "scaled_dot_product_attention, a call for each sequence",
}


def attend(q: Tensor, k: Tensor, v: Tensor, groups: tuple[GroupLayout, ...], scores: Scores, run: Kernel) -> Tensor:
    """A packed row (L, H, D) with keys and values (L, H_kv, D) -> (L, H, D_v)."""
    whole, index = sequences(groups, q.device)
    return run(q, k.index_select(0, index), v.index_select(0, index), whole, scores)
