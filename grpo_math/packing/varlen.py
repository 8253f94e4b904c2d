"""Attention over sequences of unequal length: one call of a varlen kernel, or one call of sdpa per sequence.

A prompt is a sequence that attends to itself. A segment (a completion) attends to [its prompt, itself], causal and
aligned at the lower right: its last token attends to all keys. Queries stay in the order of the row; an index gathers
keys and values. So one call computes a row with any number of groups.

Does not save memory for the gathered keys and values: autograd keeps them for the backward pass.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from inspect import signature
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import dropout, scaled_dot_product_attention

from grpo_math.packing.pack import GroupLayout
from grpo_math.run.speed_ups import switched_off


@dataclass(frozen=True)
class AttentionParams:
    """The options of attention weights. ``window`` counts the query's own position; ``sinks`` (H,) are the scores of an
    additional key without a value."""

    scale: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def needs_eager(self) -> bool:
        """True if no kernel of torch computes these weights."""
        return bool(self.softcap) or self.sinks is not None


@dataclass(frozen=True)
class Spans:
    """Lengths of the sequences of queries and of their keys, and the same as int32 offsets on the device."""

    queries: list[int]
    keys: list[int]
    cu_seqlens_q: Tensor  # (N + 1,), flash-attn's name
    cu_seqlens_k: Tensor


@lru_cache(maxsize=2)  # every layer of a micro-batch has the same arguments
def sequences(groups: tuple[GroupLayout, ...], device: torch.device) -> tuple[Spans, Tensor]:
    """Return the sequences of a row, and the index that gathers their keys.

    >>> spans, index = sequences((GroupLayout(0, 2, (3, 1)),), torch.device("cpu"))
    >>> spans.queries, spans.keys, index.tolist()
    ([2, 3, 1], [2, 5, 3], [0, 1, 0, 1, 2, 3, 4, 0, 1, 5])
    >>> spans.cu_seqlens_k
    tensor([ 0,  2,  7, 10], dtype=torch.int32)
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
    offsets = [list(accumulate(lengths, initial=0)) for lengths in (queries, keys)]
    at = torch.tensor(offsets, dtype=torch.int32).to(device, non_blocking=True)
    return Spans(queries, keys, *at.unbind()), torch.cat(taken).to(device, non_blocking=True)


Kernel = Callable[[Tensor, Tensor, Tensor, Spans, AttentionParams], Tensor]


def kernel(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Kernel:
    """Choose the kernel for tokens (L, H, D): the model's flash-attn, torch's, or `one_by_one`."""
    if is_supported := flash_takes(q, k, v, params.dropout):
        if (
            _loaded_flash_attn()
            and params.sinks is None
            and _used_options(params).keys() <= _parameters(_loaded_flash_attn())
        ):
            return attend_with_flash_attn
        # `varlen_attn` has no dropout.
        if not (params.dropout or params.needs_eager):
            return attend_with_torch
    # A CPU has no such kernel. Without gradients, scoring.py also compares scores in float32.
    if q.device.type == "cuda" and torch.is_grad_enabled():
        tensors = f"{q.dtype} with heads of size {q.size(-1)}"
        switched_off("varlen kernel", f"no kernel takes {'dropout, a softcap or sinks' if is_supported else tensors}")
    return one_by_one


def flash_takes(q: Tensor, k: Tensor, v: Tensor, dropped: float = 0.0) -> bool:
    """Return True if torch's flash kernel supports this device, dtype and head size."""
    # The flash kernel needs heads of a multiple of 8. torch pads them in its sdpa, but not in a varlen call.
    if q.device.type != "cuda" or torch.version.hip or q.size(-1) % 8 or q.size(-1) != v.size(-1):
        return False
    first, second, third = (states.transpose(0, 1)[None] for states in (q, k, v))
    # torch's rules change between versions: ask torch instead of repeating them.
    params = torch.backends.cuda.SDPAParams(first, second, third, None, dropped, True, True)
    return torch.backends.cuda.can_use_flash_attention(params)


def _loaded_flash_attn() -> Any:
    """Return the `flash_attn_varlen_func` that transformers has loaded for ``flash_attention_*``, or None."""
    from transformers import modeling_flash_attention_utils as flash

    return flash._flash_varlen_fn


def _used_options(params: AttentionParams) -> dict[str, Any]:
    """Return the options that not every version of flash-attn has, without unused ones."""
    options = {
        "dropout_p": params.dropout,
        "softcap": params.softcap,
        "window_size": _window(params) if params.window else None,
    }
    return {name: value for name, value in options.items() if value}


@cache  # `signature` is slow, and every layer needs it
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(signature(function).parameters)


def _window(params: AttentionParams) -> tuple[int, int]:
    """Return the number of keys to the left and to the right of a query's own, as kernels count them; -1: all."""
    return (params.window - 1 if params.window else -1, 0)


def attend_with_torch(q: Tensor, k: Tensor, v: Tensor, spans: Spans, params: AttentionParams) -> Tensor:
    # Before torch 2.13 grouped heads need no flag.
    grouped: Any = {"enable_gqa": True} if "enable_gqa" in _parameters(varlen_attn) else {}
    output = varlen_attn(
        q,
        k,
        v,
        spans.cu_seqlens_q,
        spans.cu_seqlens_k,
        max(spans.queries),
        max(spans.keys),
        scale=params.scale,
        # The window makes the call causal: (-1, 0) is all keys up to the query's own position.
        window_size=_window(params),
        **grouped,
    )
    return cast(Tensor, output)


def attend_with_flash_attn(q: Tensor, k: Tensor, v: Tensor, spans: Spans, params: AttentionParams) -> Tensor:
    out = _loaded_flash_attn()(
        q,
        k,
        v,
        cu_seqlens_q=spans.cu_seqlens_q,
        cu_seqlens_k=spans.cu_seqlens_k,
        max_seqlen_q=max(spans.queries),
        max_seqlen_k=max(spans.keys),
        softmax_scale=params.scale,
        # The versions of flash-attn that transformers supports align this at the lower right.
        causal=True,
        **_used_options(params),
    )
    return out[0] if isinstance(out, tuple) else out  # some versions return the log-sum-exp, too


def one_by_one(q: Tensor, k: Tensor, v: Tensor, spans: Spans, params: AttentionParams) -> Tensor:
    """Call `scaled_dot_product_attention` for each sequence: (L, H, D) and keys, values (K, H_kv, D) -> (L, H, D)."""
    # No fused kernel of CUDA takes float32 and grouped heads.
    if q.device.type != "cpu" or params.needs_eager:
        k, v = (heads.repeat_interleave(q.size(1) // heads.size(1), dim=1) for heads in (k, v))
    outputs = []
    for one in zip(q.split(spans.queries), k.split(spans.keys), v.split(spans.keys), strict=True):
        one_q, one_k, one_v = (states.transpose(0, 1)[None] for states in one)
        outputs.append(_attend_to_sequence(one_q, one_k, one_v, params)[0].transpose(0, 1))
    return torch.cat(outputs)


def _attend_to_sequence(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    """Attend to one sequence, causal from the lower right: (1, H, L, D) in and out."""
    queries, keys = q.size(2), k.size(2)
    if params.needs_eager:
        return _eager(q, k, v, params)
    # On a CPU no fused kernel supports "causal from the lower right", so the mask is passed.
    if params.window or (queries < keys and q.device.type == "cpu"):
        mask: Any = _mask(queries, keys, params.window, q.device)
    else:
        # ``is_causal`` aligns at the upper left, which is the same only for equally many queries and keys.
        mask = None if queries == keys else causal_lower_right(queries, keys)
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=params.dropout,
        is_causal=mask is None,
        scale=params.scale,
        enable_gqa=q.size(1) != k.size(1),
    )


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return the causal mask (queries, keys), aligned at the lower right.

    >>> _mask(2, 4, 2, torch.device("cpu")).int()
    tensor([[0, 1, 1, 0],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask.triu(keys - queries - window + 1) if window else mask


def _eager(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    r"""Compute attention with scores :math:`c \tanh(s / c)` and with sinks.

    >>> q, k, v = (torch.tensor(values).view(1, 1, -1, 1) for values in ([2.0], [0.0, 2.0], [0.0, 1.0]))
    >>> score = math.log(_eager(q, k, v, AttentionParams(scale=1.0, dropout=0.0, window=None, softcap=8.0)) ** -1 - 1)
    >>> round(-score, 4) == round(8 * math.tanh(4 / 8), 4)
    True
    """
    # Scaled before the product, which could exceed the largest number of float16.
    products = q * (1 / math.sqrt(q.size(-1)) if params.scale is None else params.scale) @ k.transpose(2, 3)
    # The cap comes before the mask: tanh would turn a masked score of -inf into a finite one.
    if params.softcap:
        products = params.softcap * torch.tanh(products / params.softcap)
    products = products.masked_fill(~_mask(q.size(2), k.size(2), params.window, q.device), -math.inf)
    if params.sinks is not None:
        sinks = params.sinks.to(q.dtype).view(1, -1, 1, 1).expand(-1, -1, q.size(2), 1)
        products = torch.cat([products, sinks], dim=-1)
    # A sink takes a share of the softmax and has no value: it is removed before the product with the values.
    weights = products.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return dropout(weights[..., : k.size(2)], params.dropout) @ v


NAMES: dict[Kernel, str] = {
    attend_with_torch: "torch's varlen kernel, one call per layer",
    attend_with_flash_attn: "flash-attn's varlen kernel, one call per layer",
    one_by_one: "scaled_dot_product_attention, a call for each sequence",
}


def attend(
    q: Tensor, k: Tensor, v: Tensor, groups: tuple[GroupLayout, ...], params: AttentionParams, run: Kernel
) -> Tensor:
    """Compute attention over a packed row (L, H, D) with keys and values (L, H_kv, D) -> (L, H, D_v)."""
    spans, index = sequences(groups, q.device)
    return run(q, k.index_select(0, index), v.index_select(0, index), spans, params)
