"""Attention over packed rows: a prompt attends to itself, a completion attends to its prompt and itself.

On a GPU no mask is built. One call of a varlen kernel computes a layer, for any number of groups (`varlen.py`).

The function is registered with transformers as ``packed_sdpa``, as ``packed_eager`` for models without sdpa, or under
the name of the configured flash attention. Rows that are not packed use the model's original attention, so that one
model serves generation, evaluation and packed scoring.

Does not support layers with a state (`recurrent.py` does) or unknown kinds of layers. `unsupported` names these, or the
first packed pass raises `Unpackable`. The trainer then scores as TRL does.
"""

import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from grpo_math.packing import varlen
from grpo_math.packing.pack import GroupLayout, Unpackable
from grpo_math.packing.varlen import AttentionParams

NAME, EAGER = "packed_sdpa", "packed_eager"  # instead of sdpa, and of eager
# Kinds of layers that call an attention function.
ATTENDING = {"full_attention", "sliding_attention", "hybrid"}
STATEFUL = {"linear_attention", "conv", "hybrid"}  # kinds of layers that `recurrent.py` supports
KNOWN_LAYERS = ATTENDING | STATEFUL | {"mlp", "moe"}
LONGEST_ROW = "positions that depend on the longest row of a pass"
# Arguments that layers pass, and that do not change attention scores.
UNUSED = {"position_ids", "use_cache", "scored_index", "output_router_logits"}

# transformers' functions whose names packed attention has taken.
original_attention: dict[str, Any] = {}
kernels_used: set[str] = set()  # by their `varlen.NAMES`, for the planner and benchmarks


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
    packed_calls: Counter[str] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface: query (1, H, L, D), key and value (1, H_kv, L, D) -> (1, L, H, D_v).

    Without ``packed_groups`` this is the model's original attention. Raises `Unpackable` for an argument or a layer
    that would change the scores.
    """
    if packed_groups is None:
        return _unpacked_attention(module)(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if packed_calls is not None:
        packed_calls["attention"] += 1
    # A sink counts only if the original attention uses it: sdpa ignores ``s_aux``.
    sinks = kwargs.pop("s_aux", None) if _implementation(module) != NAME else None
    # `PackedScorer` passes a mask with one row. The mask of a model has a row for each query.
    if attention_mask is not None and attention_mask.numel() > attention_mask.size(-1):
        raise Unpackable("its own mask")
    sliding_window, softcap = kwargs.pop("sliding_window", None), kwargs.pop("softcap", None)
    _refuse_ignored(module, sliding_window, softcap, kwargs)
    # A window longer than every sequence has no effect, and more kernels work without a window.
    if sliding_window and sliding_window >= max(group.prompt + max(group.lengths) for group in packed_groups):
        sliding_window = None
    params = AttentionParams(scaling, dropout, sliding_window, softcap, sinks)
    # Under autocast, rotary embeddings return float32 queries and keys next to bfloat16 values: cast all three. On a
    # CPU the backward pass of bfloat16 attention takes 4 times as long as float32's.
    kind = query.device.type
    model_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    dtype = torch.promote_types(model_dtype, torch.float32) if on_cpu(query) else model_dtype
    q, k, v = (states[0].transpose(0, 1).to(dtype) for states in (query, key, value))
    run = varlen.kernel(q, k, v, params)
    kernels_used.add(varlen.NAMES[run])
    return varlen.attend(q, k, v, packed_groups, params, run)[None].to(model_dtype), None


def on_cpu(states: Tensor) -> bool:
    return states.device.type == "cpu"


def _unpacked_attention(module: torch.nn.Module) -> Any:
    """Return the attention function of rows that are not packed."""
    name = _implementation(module)
    if name == EAGER:
        # transformers registers no eager attention: each model's file has its own function.
        return sys.modules[type(module).__module__].eager_attention_forward
    return original_attention.get(name) or AttentionInterface()["sdpa"]


def _implementation(module: torch.nn.Module) -> str:
    return getattr(getattr(module, "config", None), "_attn_implementation", NAME)


def _refuse_ignored(
    module: torch.nn.Module, sliding_window: int | None, softcap: float | None, kwargs: dict[str, Any]
) -> None:
    """Raise `Unpackable` for arguments that would change the result, and for a window or cap that is not passed."""
    # transformers passes the options of a layer as keywords, and attention functions ignore unknown ones. An ignored
    # option would change log-probs without an error.
    causal = kwargs.pop("is_causal", None)
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise Unpackable("attention that is not causal")
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in UNUSED:
            raise Unpackable(f"attention with {name!r}")
    config = getattr(module, "config", None)
    if softcap != (getattr(config, "attn_logit_softcapping", None) or None):
        raise Unpackable("attention whose softcap differs from attn_logit_softcapping")
    if sliding_window != _layer_window(config, getattr(module, "layer_idx", None)):
        raise Unpackable("attention whose sliding window differs from the config's")


def _layer_window(config: Any, layer: int | None) -> int | None:
    """Return the window of a layer's mask according to the model's config."""
    window = getattr(config, "sliding_window", None)
    if not window or not getattr(config, "use_sliding_window", True):
        return None
    types = getattr(config, "layer_types", None)
    return window if not types or layer is None or types[layer] == "sliding_attention" else None


def only_scored(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of the model's body: pass only the scored tokens of a packed row to the LM head."""
    # Without Triton, as on a CPU, TRL's head projects every token, prompts included.
    index = kwargs.get("scored_index")
    if index is not None and len(index) < output.last_hidden_state.size(1):
        output.last_hidden_state = output.last_hidden_state[:, index]
    return output


def unsupported(config: Any, knows_sdpa: bool) -> str | None:
    """Return why rows of this model cannot be packed, or None.

    Eager attention is packed only if the model supports no other: with sdpa, the user has asked for eager. Flash
    attention is packed.

    >>> from types import SimpleNamespace as Config
    >>> unsupported(Config(_attn_implementation="sdpa", layer_types=["conv", "compressed_attention"]), knows_sdpa=True)
    "layers of type 'compressed_attention'"
    >>> unsupported(Config(_attn_implementation="eager", layer_types=["full_attention"]), knows_sdpa=True)
    "attention implementation 'eager' (packing has sdpa and flash attention)"
    >>> unsupported(Config(_attn_implementation="eager", layer_types=["full_attention"]), knows_sdpa=False)
    """
    implementation = getattr(config, "_attn_implementation", None)
    if (
        "flash" not in str(implementation)
        and implementation not in ("sdpa", NAME, EAGER)
        and (implementation != "eager" or knows_sdpa)
    ):
        return f"attention implementation {implementation!r} (packing has sdpa and flash attention)"
    # Vision models nest the config of their language model.
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if unknown := sorted(set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYERS):
        return f"layers of type {unknown[0]!r}"
    return None


def registered() -> list[Any]:
    """Return transformers' function of each attention that packed attention replaces: a script may register another."""
    return [AttentionInterface().get(name) for name in ("sdpa", *original_attention)]


def register(implementation: str) -> str:
    """Register packed attention with transformers instead of ``implementation``, and return its name there."""
    # Flash attention keeps its name, because masks, generation and the kernel itself depend on it.
    if "flash" in implementation:
        # Only the first time: afterwards transformers has our function under this name.
        original_attention.setdefault(implementation, AttentionInterface()[implementation])
        AttentionInterface.register(implementation, packed_attention)
        return implementation
    name, mask = (EAGER, eager_mask) if "eager" in implementation else (NAME, sdpa_mask)
    AttentionInterface.register(name, packed_attention)
    # transformers builds no mask for a name without a mask function. Rows that are not packed would attend to padding.
    AttentionMaskInterface.register(name, mask)
    return name
