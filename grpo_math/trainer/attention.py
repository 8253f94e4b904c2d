"""The attention of packed rows: each group's prompt sees itself, each segment sees its prompt and itself.

No (L, L) mask is built. For every group two calls of the device's scaled dot product attention do it: one causal call
for the prompt, and one batched call for the segments, whose keys are [prompt, segment]. Segments of a group are
batched in order of length, so that little padding is computed.

The function is registered with transformers as ``packed_sdpa``; rows that are not packed go on to ``sdpa`` unchanged,
so that one model serves generation, evaluation and packed scoring.

Does not serve sliding windows, soft-capped scores, or layers that are not attention: `unsupported` says so by name, or
`Unpackable` in the first packed pass, and the trainer then scores the plain way.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from grpo_math.generation.decoding import forgets
from grpo_math.trainer.packing import GroupLayout

NAME = "packed_sdpa"
# Segments of a batched call are padded to its longest: a shorter one joins only if it is at least this share of it.
BATCH_FILL = 0.7
# What layers hand on besides, and attention has no use for.
UNUSED = {"position_ids", "use_cache", "scored_index"}

calls = 0  # of `packed_attention` with packed rows, in this process


class Unpackable(Exception):
    """A model whose attention was not called as packed rows need it."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_groups: tuple[GroupLayout, ...] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (1, H, L, D), key and value (1, H_kv, L, D) -> (1, L, H, D).

    Without ``packed_groups`` this is transformers' ``sdpa``.
    """
    if packed_groups is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    global calls
    calls += 1
    _refuse_ignored(module, kwargs)
    # On a CPU the backward pass of bfloat16 attention takes 4 times as long as float32's.
    dtype = torch.float32 if query.device.type == "cpu" else query.dtype
    # Tokens first, (L, H, D): a segment is then a plain slice.
    q, k, v = (states[0].transpose(0, 1).to(dtype) for states in (query, key, value))
    pieces: list[Tensor] = []
    for group in packed_groups:
        prompt = slice(group.start, group.start + group.prompt)
        if group.prompt:
            pieces.append(_attend(q[prompt][None], k[prompt][None], v[prompt][None], None, dropout, scaling)[0])
        pieces.append(_segments(q, k, v, group, dropout, scaling))
    return torch.cat(pieces)[None].to(query.dtype), None


def _refuse_ignored(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise `Unpackable` for an argument that would change the result: a bias, a sink, a cap, a window."""
    causal = kwargs.pop("is_causal", None)
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise Unpackable("attention that is not causal")
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in UNUSED:
            raise Unpackable(f"attention with {name!r}")


def _segments(q: Tensor, k: Tensor, v: Tensor, group: GroupLayout, dropout: float, scaling: float | None) -> Tensor:
    """All segments of a group, (sum of lengths, H, D), in the row's order."""
    first, end = group.start + group.prompt, group.start + group.prompt + sum(group.lengths)
    own_q, own_k, own_v = q[first:end], k[first:end], v[first:end]
    prompt_k, prompt_v = k[group.start : first], v[group.start : first]
    outputs = []
    gathers, back = _batches(group.lengths, q.device)
    for gather in gathers:
        n, length = gather.shape
        if n == 1 and group.prompt <= length:
            outputs.append(_alone(q, k, v, gather[0] + first, slice(group.start, first), dropout, scaling))
            continue
        keys = torch.cat([prompt_k.expand(n, *prompt_k.shape), own_k[gather]], dim=1)
        values = torch.cat([prompt_v.expand(n, *prompt_v.shape), own_v[gather]], dim=1)
        # All of the prompt, and the segment up to oneself. Padding comes after every query.
        mask = torch.ones(length, keys.size(1), dtype=torch.bool, device=q.device).tril(diagonal=group.prompt)
        outputs.append(_attend(own_q[gather], keys, values, mask, dropout, scaling).flatten(0, 1))
    return torch.cat(outputs)[back]


def _alone(
    q: Tensor, k: Tensor, v: Tensor, segment: Tensor, prompt: slice, dropout: float, scaling: float | None
) -> Tensor:
    """One segment, (length, H, D), as the end of a causal row: the prompt once more, for no mask of length squared."""
    q, k, v = (torch.cat([states[prompt], states[segment]])[None] for states in (q, k, v))
    return _attend(q, k, v, None, dropout, scaling)[0, prompt.stop - prompt.start :]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scaling: float | None) -> Tensor:
    """(n, L, H, D) in and out. No mask means causal."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if mask is not None and not masks_grouped_heads(q.device):
        k, v = (heads.repeat_interleave(q.size(1) // heads.size(1), dim=1) for heads in (k, v))
    grouped = q.size(1) != k.size(1)
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2)


def masks_grouped_heads(device: torch.device) -> bool:
    """Whether a fused kernel takes a mask together with fewer key heads than query heads.

    A CPU's does. On CUDA torch would fall back to the kernel that writes all scores in float32 (so says transformers'
    ``use_gqa_in_sdpa``; not tried here), so keys and values are repeated first.
    """
    return device.type == "cpu"


@lru_cache(maxsize=256)
def _batches(lengths: tuple[int, ...], device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Segments in batches of similar length, as indices (n, longest) into the group's segment tokens; then the index
    that brings the batches' padded output back into the row's order."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and lengths[i] >= BATCH_FILL * lengths[batches[-1][0]]:
            batches[-1].append(i)
        else:
            batches.append([i])
    gathers, shapes = [], []
    back = torch.empty(sum(lengths), dtype=torch.long)
    offset = 0
    for batch in batches:
        longest = lengths[batch[0]]
        rows = [[starts[i] + min(t, lengths[i] - 1) for t in range(longest)] for i in batch]
        for i in batch:
            back[starts[i] : starts[i] + lengths[i]] = torch.arange(offset, offset + lengths[i])
            offset += longest
        gathers.append(torch.tensor(rows).flatten())
        shapes.append((len(rows), longest))
    *flat, back = torch.cat([*gathers, back]).to(device, non_blocking=True).split([*map(len, gathers), len(back)])
    return [gather.view(shape) for gather, shape in zip(flat, shapes, strict=True)], back


def only_scored(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of the model's body: of a packed row, only the scored tokens go on to the LM head.

    TRL's head would project the prompts too where it has no Triton, as on a CPU.
    """
    index = kwargs.get("scored_index")
    if index is not None and len(index) < output.last_hidden_state.size(1):
        output.last_hidden_state = output.last_hidden_state[:, index]
    return output


def unsupported(config: Any) -> str | None:
    """Why rows of this model cannot be packed, or None when they can.

    >>> from types import SimpleNamespace as Config
    >>> unsupported(Config(_attn_implementation="sdpa", layer_types=["full_attention", "sliding_attention"]))
    "layers of type 'sliding_attention'"
    >>> unsupported(Config(_attn_implementation="sdpa", layer_types=["full_attention"]))
    """
    attention = getattr(config, "_attn_implementation", None)
    if attention not in ("sdpa", NAME):
        return f"attention implementation {attention!r} (packing has sdpa)"
    if getattr(config, "attn_logit_softcapping", None):
        return "soft-capped attention scores"
    return forgets(config)


def register() -> None:
    """Make ``packed_sdpa`` known to transformers. Registering twice does no harm."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
