"""Names of families of models, and names that differ between versions of transformers. No other module has them."""

from collections.abc import Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from grpo_math.system.replaced import replaced

# In this order: transformers maps the first name to another one in some families.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# From transformers 5.24 on, `cache` for every family. Before, `cache_params` for Mamba's layers.
CACHE = ("cache", "past_key_values", "cache_params")
# Families whose activations exceed 65504, by the beginning of their ``model_type``, with a report of the overflow.
_UNSLOTH = "https://github.com/unslothai/unsloth-zoo/blob/main/unsloth_zoo/model_lists.py"
OVERFLOWING = {
    "gemma3": "https://github.com/huggingface/transformers/issues/36822",
    **dict.fromkeys(("gpt_oss", "qwen3_5"), _UNSLOTH),
}
# Families whose products of queries and keys exceed 65504. torch's SDPA and flash attention do not round them.
OVERFLOWING_IN_EAGER = {"qwen2": "https://github.com/QwenLM/Qwen3/issues/868"}
# Layers whose ``post_attention_layernorm`` feeds the MLP, and nothing else: trainer/tiled_mlp.py computes it in tiles.
NORMED = tuple(f"{name}DecoderLayer" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma"))


def cache_name(names: Container[str]) -> str:
    """Return the name of the cache in ``names``: a function's parameters, its keyword arguments, or a model's output.

    Return an empty string if there is no cache.

    >>> cache_name({"input_ids", "past_key_values"}), cache_name(["cache", "past_key_values"]), cache_name([])
    ('past_key_values', 'cache', '')
    """
    return next((name for name in CACHE if name in names), "")


def overflow_report(family: str, families: Mapping[str, str] = OVERFLOWING) -> str:
    """Return the address of a report that this family overflows in float16, or "".

    >>> overflow_report("gemma3_text"), overflow_report("qwen3"), overflow_report("qwen2")
    ('https://github.com/huggingface/transformers/issues/36822', '', '')
    """
    return next((address for start, address in families.items() if family.startswith(start)), "")


def experts_per_token(config: Any) -> int:
    """Return the number of experts that compute a token: 1 if the layers have no experts."""
    return getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 1


def experts_for_trl(config: Any) -> AbstractContextManager[None]:
    """Give ``config`` the name of the number of experts that TRL reads in every family, inside this context."""
    # Not for longer, because the attribute would be saved in config.json.
    counts = [getattr(config, name) for name in EXPERTS if hasattr(config, name)]
    return replaced(config, num_experts=counts[0]) if counts else nullcontext()
