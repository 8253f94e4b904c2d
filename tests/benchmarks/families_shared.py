"""Which families train on the weights of a colocated vLLM: families_shared.py [4bit] [FAMILY ...] > table.md.

Run it with the Python that `grpo-math serve --make_env` makes, which has vLLM for the CPU. Each family is a tiny random
model in float32, which is trained for two steps with two copies of the base and with one (`vllm_share_weights`). The
table says for each whether the base is shared or why not, whether the adapters are equal bit for bit, and how much less
memory the run on one copy takes. Half a minute for a family on two cores.

With 4bit, the base is quantised, and the environment needs vllm-bnb-plugin.

Does not run on a GPU, where vLLM may choose kernels that repack weights.
"""

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "processes"))
os.environ["OMP_NUM_THREADS"] = "1"  # a fork of a process with threads would wait for them
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import one_copy
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from grpo_math.errors import first_line
from grpo_math.generation.models import load_tokenizer, model_path

# By the names of any family; a family gets those that its config has. vLLM on a CPU takes no head below 32.
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "conv_dim", "conv_dim_out", "mamba_d_ssm"), 128),
    **dict.fromkeys(("intermediate_size", "n_inner"), 192),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "linear_num_value_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_head"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    **dict.fromkeys(("eos_token_id", "pad_token_id"), 2),
    "num_experts_per_tok": 2,
    "mamba_d_state": 16,
    "sliding_window": None,
    "vocab_size": 49152,
    "bos_token_id": 1,
}
# Families whose attention alone is adapted: vLLM takes no adapter of stacked experts, or of the gate_up_proj of GLM.
ATTENTION = (
    *("qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "granitemoe", "gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3"),
    *("qwen3_next", "glm", "glm4", "falcon_h1"),
)
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "granite"),
    *("exaone4", "cohere", "cohere2", "nemotron", "ernie4_5", "seed_oss", "arcee", "stablelm"),
    # vLLM has no class of its own for these, and runs transformers'.
    *("olmo", "olmo2", "olmo3", "smollm3", "starcoder2", "hunyuan_v1_dense"),
    *("gpt2", "gpt_neox", "apertus", "lfm2"),
    *ATTENTION,
)
OWN = {
    **{name: {"sliding_window": 64} for name in ("gemma2", "gemma3_text", "exaone4", "cohere2", "olmo3", "gpt_oss")},
    **{name: {"num_key_value_heads": 4} for name in ("deepseek_v2", "deepseek_v3")},
    # vLLM does not read the size of the MLP of these.
    "phi": {"num_key_value_heads": 4, "intermediate_size": 512},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
}
LIMIT = 600  # seconds of a run


def save_tiny(family: str, folder: str, tokenizer: object, dtype: torch.dtype) -> None:
    fields = AutoConfig.for_model(family).to_dict()
    sizes = {name: size for name, size in SIZES.items() if name in fields}
    config = AutoConfig.for_model(family, **{**sizes, **OWN.get(family, {})})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # biases too, so that a lost one is seen
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    model.generation_config.eos_token_id = 2
    for part in (model.to(dtype), tokenizer):
        part.save_pretrained(folder)


def trained(folder: str, targets: str, shares: bool, in_4bit: bool) -> dict:
    """Return what was measured of a run, with vLLM's class, or the reason why it did not run."""
    signal.alarm(LIMIT)
    try:
        trainer, record = one_copy.run(folder, targets=targets, in_4bit=in_4bit, vllm_share_weights=shares)
    except Exception as error:
        return {"reason": first_line(error).replace("|", "/")[:110]}
    runner = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner
    return {**record, "class": type(runner.get_model()).__name__}


def row(family: str, tokenizer: object, in_4bit: bool) -> tuple[str, ...]:
    """Return what vLLM runs the family with, the outcome, and the memory of both runs."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            # In 4 bit, both copies are quantised from the same 16 bits.
            save_tiny(family, folder, tokenizer, torch.bfloat16 if in_4bit else torch.float32)
            targets = r".*self_attn\.\w*proj\w*" if family in ATTENTION else "all-linear"
            two, one = (one_copy.in_child(trained, folder, targets, shares, in_4bit) for shares in (False, True))
        except Exception as error:
            return "", f"no tiny model, or a run that died or took more than {LIMIT} s: {first_line(error)}", ""
        size = one_copy.weight_bytes(folder)
    if "reason" in two:
        return "", f"not run by vLLM here: {two['reason']}", ""
    if "reason" in one:
        return two["class"], f"refused: {one['reason']}", ""
    # Without a change of the adapter, the comparison would show nothing.
    is_equal = one["adapter"] == two["adapter"] and one["completions"] == two["completions"] and one["moved"] > 0
    outcome = f"{one['shared']:.0%} shared, adapter {'equal' if is_equal else 'NOT equal'}"
    return one["class"], outcome, f"{(two['bytes'] - one['bytes']) / 1e6:.0f} of {size / 1e6:.0f}"


def main(*words: str) -> None:
    in_4bit, families = "4bit" in words, [word for word in words if word != "4bit"]
    set_verbosity_error()
    disable_progress_bar()
    logging.disable(logging.WARNING)
    one_copy.make_cpu_like_gpu()
    tokenizer = load_tokenizer(model_path("embedded"))
    print("| family | vLLM's class | base and adapter | MB less, of the base's |\n|---|---|---|---|", flush=True)
    for family in families or FAMILIES:
        print(f"| {family} | {' | '.join(row(family, tokenizer, in_4bit))} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
