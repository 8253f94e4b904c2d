"""Packed attention without a copy of any key: prompts and segments each see themselves, then all segments of a group
see their prompt in one sequence; the two are merged by the logarithms of their sums.

With :math:`o_i, l_i` the output and log-sum-exp of part i, :math:`l = \\log(e^{l_1} + e^{l_2})` and
:math:`o = e^{l_1 - l} o_1 + e^{l_2 - l} o_2`. Backward, a flash kernel needs only the output and the log-sum-exp of the
forward pass: given the final ones, each part returns its share of the exact gradient.

Does not drop out, cap scores or know windows (`varlen.py` does); kernels are torch's own, of CUDA or of the CPU.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_math.trainer.packing import GroupLayout
from grpo_math.trainer.varlen import Spans, flash_takes, spans

# Passes over a tensor of heads, forward and backward, as counted in the code: what gathered keys and values take (of
# `varlen.attend`), and what gathering, merging and adding up takes here. Not measured on a GPU.
GATHERED, MERGED = 8, 21
CALLS = 100e6  # bytes that a GPU moves in the time of the 20 launches that a cascade needs more
LONG = 512  # tokens of a segment from which a CPU is faster without its mask: 14% for 1024, -5% for 256


@dataclass(frozen=True)
class Levels:
    """``own``: every prompt and segment by itself. ``shared``: a group's segments, as one sequence, and its prompt;
    None where no prompt has a token to share."""

    own: Spans
    shared: Spans | None
    segments: Tensor  # where those segments' tokens lie in the row
    prompts: Tensor


@lru_cache(maxsize=2)  # every layer of a part asks for the same
def levels(groups: tuple[GroupLayout, ...], device: torch.device) -> Levels:
    """
    >>> of_row = levels((GroupLayout(0, 2, (3, 1)), GroupLayout(6, 0, (1,))), torch.device("cpu"))
    >>> of_row.own.queries, of_row.shared.queries, of_row.shared.keys
    ((2, 3, 1, 1), (4,), (2,))
    >>> of_row.segments.tolist(), of_row.prompts.tolist()
    ([2, 3, 4, 5], [0, 1])
    """
    lengths = [length for group in groups for length in (group.prompt, *group.lengths) if length]
    shared = [(group, sum(group.lengths)) for group in groups if group.prompt]
    starts = [(group.start + group.prompt, completions) for group, completions in shared]
    index = [torch.arange(first, first + n) for first, n in (*starts, *((g.start, g.prompt) for g, _ in shared))]
    taken = torch.cat([*index, torch.empty(0, dtype=torch.long)]).to(device, non_blocking=True)
    together = [completions for _, completions in shared]
    return Levels(
        own=spans(lengths, lengths, device),
        shared=spans(together, [group.prompt for group, _ in shared], device) if shared else None,
        segments=taken[: sum(together)],
        prompts=taken[sum(together) :],
    )


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a kernel is there that returns and takes the log-sum-exp, for tokens (L, H, D)."""
    return flash_takes(q, k, v) if q.device.type == "cuda" else q.device.type == "cpu" and q.size(-1) == v.size(-1)


@lru_cache(maxsize=64)
def pays(groups: tuple[GroupLayout, ...], device: str, heads: int, kv_heads: int, head_bytes: int) -> bool:
    """Whether gathering keys and values would move more bytes than merging, by more than the calls cost; on a CPU,
    whether a segment is long.

    >>> pays((GroupLayout(0, 100, (300,) * 8),), "cuda", heads=12, kv_heads=2, head_bytes=256)
    False
    >>> pays((GroupLayout(0, 8000, (300,) * 8),), "cuda", heads=12, kv_heads=2, head_bytes=256)
    True
    """
    if device == "cpu":
        return max(length for group in groups for length in group.lengths) >= LONG
    segments = sum(sum(group.lengths) for group in groups)
    keys = segments + sum(group.prompt * (len(group.lengths) + 1) for group in groups)
    return (GATHERED * kv_heads * keys - MERGED * heads * segments) * head_bytes > CALLS


def attend(q: Tensor, k: Tensor, v: Tensor, groups: tuple[GroupLayout, ...], scale: float | None) -> Tensor:
    """A packed row (L, H, D) with keys and values (L, H_kv, D) -> (L, H, D)."""
    return Cascade.apply(q, k, v, levels(groups, q.device), scale)


class Cascade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, of_row: Levels, scale: float | None) -> Tensor:
        out, lse = _forward(q, k, v, of_row.own, True, scale)
        if of_row.shared:
            segments, prompts = of_row.segments, of_row.prompts
            of_prompt, lse_of_prompt = _forward(q[segments], k[prompts], v[prompts], of_row.shared, False, scale)
            lse_of_own = lse[:, segments]
            share = torch.sigmoid(lse_of_prompt - lse_of_own).T[..., None]
            merged = torch.lerp(out[segments].to(share.dtype), of_prompt.to(share.dtype), share)
            out.index_copy_(0, segments, merged.to(out.dtype))
            lse.index_copy_(1, segments, torch.logaddexp(lse_of_own, lse_of_prompt))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.of_row, ctx.scale = of_row, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        of_row = ctx.of_row
        grads = _backward(grad, q, k, v, out, lse, of_row.own, True, ctx.scale)
        if of_row.shared:
            segments, prompts = of_row.segments, of_row.prompts
            inputs = (grad[segments], q[segments], k[prompts], v[prompts], out[segments], lse[:, segments])
            more = _backward(*inputs, of_row.shared, False, ctx.scale)
            for total, at, share in zip(grads, (segments, prompts, prompts), more, strict=True):
                total.index_add_(0, at, share)
        return *grads, None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, of_call: Spans, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Output (L, H, D) and log-sum-exp (H, L) of the sequences."""
    if q.device.type == "cuda":
        where = (of_call.at_queries, of_call.at_keys, max(of_call.queries), max(of_call.keys))
        return torch.ops.aten._flash_attention_forward(q, k, v, *where, 0.0, causal, False, scale=scale)[:2]
    run, n = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, k.size(1)
    outs, lses = [], []
    for one in zip(q.split(of_call.queries), k.split(of_call.keys), v.split(of_call.keys), strict=True):
        out, lse = run(*_by_key_head(n, q.size(1), *one), 0.0, causal, scale=scale)
        outs.append(out.permute(2, 0, 1, 3).flatten(1, 2))
        lses.append(lse.flatten(0, 1))
    return torch.cat(outs), torch.cat(lses, dim=1)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    of_call: Spans,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """The share of the gradients of q, k and v that these sequences have in a row with that output and log-sum-exp."""
    if q.device.type == "cuda":
        where = (of_call.at_queries, of_call.at_keys, max(of_call.queries), max(of_call.keys))
        no_dropout = (torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device))
        run = torch.ops.aten._flash_attention_backward
        lse = lse.contiguous()
        return run(grad, q, k, v, out, lse, *where, 0.0, causal, *no_dropout, scale=scale)
    run, n = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, k.size(1)
    of_queries = (states.split(of_call.queries) for states in (grad, q, out))
    of_keys = (states.split(of_call.keys) for states in (k, v))
    pieces: tuple[list[Tensor], ...] = ([], [], [])
    for g, a, o, b, c, own in zip(*of_queries, *of_keys, lse.split(of_call.queries, dim=1), strict=True):
        g, a, o, b, c = _by_key_head(n, q.size(1), g, a, o, b, c)
        of_q, of_k, of_v = run(g, a, b, c, o, own.unflatten(0, (n, -1)), 0.0, causal, scale=scale)
        pieces[0].append(of_q.permute(2, 0, 1, 3).flatten(1, 2))
        pieces[1].append(of_k.sum(1).transpose(0, 1))
        pieces[2].append(of_v.sum(1).transpose(0, 1))
    return tuple(torch.cat(piece) for piece in pieces)


def _by_key_head(n: int, heads: int, *states: Tensor) -> list[Tensor]:
    """(L, H or n, D) -> (n, H / n, L, D) for each: query heads by their key head, which is repeated without a copy."""
    apart = (one.unflatten(1, (n, -1)).permute(1, 2, 0, 3) for one in states)
    return [one.expand(-1, heads // n, -1, -1) for one in apart]
