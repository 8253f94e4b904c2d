"""The attention of packed rows: each group's prompt sees itself, each segment sees its prompt and itself.

On a GPU no mask is built, and the number of calls does not depend on the number of groups: one call of a varlen kernel
computes a layer (`varlen.py`).

The function is registered with transformers as ``packed_sdpa``, as ``packed_eager`` for models that know no sdpa, and
under the name of a flash attention that was asked for; rows that are not packed go on to what the model had before, so
that one model serves generation, evaluation and packed scoring.

Does not serve layers with a state (`recurrent.py` does), nor kinds that nobody knows: `unsupported` says so by name, or
`Unpackable` in the first packed pass, and the trainer then scores the plain way.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from grpo_math.trainer import varlen
from grpo_math.trainer.packing import GroupLayout, Unpackable
from grpo_math.trainer.varlen import Scores

NAME, EAGER = "packed_sdpa", "packed_eager"  # in place of sdpa, and of eager
ATTENDING = {"full_attention", "sliding_attention", "hybrid"}  # kinds of layers that call an attention
STATEFUL = {"linear_attention", "conv", "hybrid"}  # of states, `recurrent.py` takes care
KNOWN_LAYERS = ATTENDING | STATEFUL | {"mlp", "moe"}
# What layers hand on besides, and attention has no use for.
UNUSED = {"position_ids", "use_cache", "scored_index"}

original_attention: dict[str, Any] = {}  # transformers' functions whose names packed attention has taken
calls = 0  # of `packed_attention` with packed rows, in this process
kernels_used: set[str] = set()  # as the log names them


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed_groups: tuple[GroupLayout, ...] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface: query (1, H, L, D), key and value (1, H_kv, L, D) -> (1, L, H, D_v).

    Without ``packed_groups`` this is the attention that the model had before. Raises `Unpackable` for an argument, or
    a layer, whose scores would not be what the model means.
    """
    if packed_groups is None:
        more = {"sliding_window": sliding_window, "softcap": softcap}
        more = {name: value for name, value in more.items() if value is not None}
        plain = _plain(module)
        return plain(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more, **kwargs)
    global calls
    calls += 1
    # What is handed on as a sink is one where the model's own attention takes it so; sdpa would ignore it.
    sinks = kwargs.pop("s_aux", None) if _implementation(module) != NAME else None
    if attention_mask is not None and attention_mask.numel() > 1:  # not the one that `PackedScorer` hands in
        raise Unpackable("a mask of its own")
    _refuse_ignored(module, sliding_window, softcap, kwargs)
    # A window that no row reaches is none: without it more kernels can serve.
    longest = max(group.prompt + max(group.lengths) for group in packed_groups)
    window = sliding_window if sliding_window and sliding_window < longest else None
    scores = Scores(scaling, dropout, window, softcap, sinks)
    # Once, and for all three: under autocast the rotation has made queries and keys float32. On a CPU the backward pass
    # of bfloat16 attention takes 4 times as long as float32's.
    kind = query.device.type
    wanted = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    dtype = torch.promote_types(wanted, torch.float32) if on_cpu(query) else wanted
    q, k, v = (states[0].transpose(0, 1).to(dtype) for states in (query, key, value))
    run = varlen.kernel(q, k, v, scores)
    kernels_used.add(varlen.NAMES[run])
    return varlen.attend(q, k, v, packed_groups, scores, run)[None].to(wanted), None


def on_cpu(states: Tensor) -> bool:
    return states.device.type == "cpu"


def _plain(module: torch.nn.Module) -> Any:
    """What the model's layers call when nothing is packed."""
    name = _implementation(module)
    if name == EAGER:
        return sys.modules[type(module).__module__].eager_attention_forward
    return original_attention.get(name) or AttentionInterface()["sdpa"]


def _implementation(module: torch.nn.Module) -> str:
    return getattr(getattr(module, "config", None), "_attn_implementation", NAME)


def _refuse_ignored(
    module: torch.nn.Module, sliding_window: int | None, softcap: float | None, kwargs: dict[str, Any]
) -> None:
    """Raise `Unpackable` for what would change the result: a bias, a sink, or a window or cap not handed on."""
    # transformers hands on what a layer wants of its attention as keywords, and an attention ignores those that it does
    # not know. Ignored ones would change log-probs without an error.
    causal = kwargs.pop("is_causal", None)
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise Unpackable("attention that is not causal")
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in UNUSED:
            raise Unpackable(f"attention with {name!r}")
    config = getattr(module, "config", None)
    if softcap != (getattr(config, "attn_logit_softcapping", None) or None):
        raise Unpackable("a cap of the scores that its attention is not told")
    if sliding_window != _window_of(config, getattr(module, "layer_idx", None)):
        raise Unpackable("a sliding window that its attention is not told")


def _window_of(config: Any, layer: int | None) -> int | None:
    """The window that a layer's mask would have, by the model's config."""
    window = getattr(config, "sliding_window", None)
    if not window or not getattr(config, "use_sliding_window", True):
        return None
    types = getattr(config, "layer_types", None)
    return window if not types or layer is None or types[layer] == "sliding_attention" else None


def only_scored(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of the model's body: of a packed row, only the scored tokens go on to the LM head.

    TRL's head would project the prompts too where it has no Triton, as on a CPU.
    """
    index = kwargs.get("scored_index")
    if index is not None and len(index) < output.last_hidden_state.size(1):
        output.last_hidden_state = output.last_hidden_state[:, index]
    return output


def unsupported(config: Any, knows_sdpa: bool = True) -> str | None:
    """Why rows of this model cannot be packed, or None when they can.

    Who asks for eager attention gets it; a model that knows no other is packed. Who asks for flash attention has it
    packed, too.

    >>> from types import SimpleNamespace as Config
    >>> unsupported(Config(_attn_implementation="sdpa", layer_types=["full_attention", "compressed_attention"]))
    "layers of type 'compressed_attention'"
    >>> unsupported(Config(_attn_implementation="sdpa", layer_types=["full_attention", "sliding_attention"]))
    """
    asked = getattr(config, "_attn_implementation", None)
    if "flash" not in str(asked) and asked not in ("sdpa", NAME, EAGER) and (asked != "eager" or knows_sdpa):
        return f"attention implementation {asked!r} (packing has sdpa and flash attention)"
    # Models with eyes nest the config of their language model.
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if other := sorted(set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYERS):
        return f"layers of type {other[0]!r}"
    return None


def register(asked: str) -> str:
    """Make packed attention known to transformers in place of `asked`; the name that it has there.

    Flash attention keeps its name: masks, generation and the kernel itself go by it. Registering twice does no harm.
    """
    if "flash" in asked:
        # Only the first time: afterwards the name stands for our own function.
        original_attention.setdefault(asked, AttentionInterface()[asked])
        AttentionInterface.register(asked, packed_attention)
        return asked
    name, mask = (EAGER, eager_mask) if "eager" in asked else (NAME, sdpa_mask)
    AttentionInterface.register(name, packed_attention)
    AttentionMaskInterface.register(name, mask)
    return name
