"""Tiny random models of transformers' families of causal language models, and how packed scores compare with TRL's."""

import torch
from small_trainers import CHARACTERS, relative, scored
from trl import GRPOTrainer

from grpo_math.trainer import largest_batch
from grpo_math.trainer.trainer import MathGRPOTrainer

LARGEST = 20e6  # parameters: more is a config that has sizes by other names
# By the names of any family; a family gets those that its config knows.
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "linear_num_value_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), len(CHARACTERS)),
    **dict.fromkeys(("eos_token_id", "pad_token_id"), 2),
    "sliding_window": 4,
    "is_decoder": True,
    "use_cache": False,
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob", "activation_dropout", "layerdrop"), 0.0),
    **dict.fromkeys(("residual_dropout", "router_jitter_noise", "input_jitter_noise"), 0.0),
}
# What else a family needs at these sizes.
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
ALL_HEADS = {"num_key_value_heads": 4}
CONVOLVED = {"layer_types": ["conv", "full_attention"]}
OWN = {
    **dict.fromkeys(("granitemoehybrid", "minimax", "olmo_hybrid"), MIXED),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), MIXED),
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "kimi_linear": MIXED | ALL_HEADS,
    **dict.fromkeys(("lfm2", "lfm2_moe"), CONVOLVED),
    "mamba2": {"num_heads": 8},
    "nemotron_h": {"layer_types": ["linear_attention", "full_attention", "moe", "mlp"], "num_hidden_layers": 4},
    "zamba": {"layer_types": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "hybrid_layer_ids": [1, 2],
        "num_hidden_layers": 3,
        **dict.fromkeys(("num_key_value_heads", "num_query_groups", "n_mamba_heads"), 4),
        **dict.fromkeys(("attention_head_dim", "mamba_headdim", "mamba_d_state", "kv_channels"), 16),
        "attention_hidden_size": 64,
    },
    "deepseek_v2": ALL_HEADS | {"first_k_dense_replace": 2},
    "deepseek_v3": ALL_HEADS | {"first_k_dense_replace": 2},
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "minicpm3", "youtu"), ALL_HEADS),
    "falcon": {"multi_query": True, "new_decoder_architecture": False},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 8},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "glm4_moe_lite": ALL_HEADS,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
}


VISION = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# Families that see, too: what is trained has the sizes of their text models.
SEEING = {
    "gemma3": {"vision_config": VISION, "mm_tokens_per_image": 4},
    "gemma4": {"vision_config": None, "audio_config": None},
    **{name: {"vision_config": VISION | {"depth": 1, "num_heads": 2}} for name in ("qwen3_5", "qwen3_5_moe")},
}


def sizes_of(family):
    from transformers import AutoConfig

    default = AutoConfig.for_model(family)
    fields = default.to_dict()
    return {name: SIZES[name] for name in SIZES if name in fields and _sets(default, name)} | OWN.get(family, {})


def tiny_model(family, **settings):
    """Raises what the family's config or model raises at these sizes."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    seeing = SEEING.get(family)
    auto_class = AutoModelForCausalLM if seeing is None else AutoModelForImageTextToText
    sizes = sizes_of(family) if seeing is None else {"text_config": sizes_of(f"{family}_text"), **seeing}
    config = AutoConfig.for_model(family, **{**sizes, **settings})
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto_class.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f}M parameters at the sizes of this test")
    torch.manual_seed(0)
    model = auto_class.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # far from the near-uniform start, so that log-probs differ
        parameter.data.mul_(2.5 if parameter.dim() > 1 else 1.0)
    return model


def _sets(config, name):
    """Whether a config can be given this field of its own; a window where it has one."""
    fixed = isinstance(getattr(type(config), name, None), property)
    return not fixed and (name != "sliding_window" or config.sliding_window is not None)


def try_first(trainer):
    """Do what a trainer of ours does before its first step: verify packing, and the dry run."""
    trainer.grpo_math.scorer.agree_to_pack()
    updates = trainer.grpo_math.updates
    if updates.dry_run_due:
        largest_batch.dry_run(
            trainer, lambda *rows: updates.loss_of(*rows, updates.new_step()).loss, updates.budget, trainer.model
        )


def compared(trainer, *rows):
    """The largest difference of our log-probs to TRL's, and the relative one of the gradient."""
    logps, _, gradient = scored(MathGRPOTrainer, trainer, *rows)
    plain_logps, _, plain_gradient = scored(GRPOTrainer, trainer, *rows)
    same_shape = gradient.shape == plain_gradient.shape
    return (logps - plain_logps).abs().max().item(), relative(gradient, plain_gradient) if same_shape else float("inf")
