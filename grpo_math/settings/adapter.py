"""Adapter and number format: our one setting, and rules. The other settings are TRL's."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from grpo_math.settings.declare import Facts, Rule, has_field, setting, without

FACTS: Facts = {"adapter": {"resume": "must_match"}}


@dataclass
class Adapter:
    """The adapter."""

    adapter: str | None = setting(
        None,
        "Train this LoRA adapter further: a folder, or owner/name[@revision] on the Hub. Rank, alpha and modules are "
        "its own.",
    )


def _is_pattern(modules: Sequence[str] | None) -> bool:
    """Return True if peft can read the modules: TRL makes a list of one name a string, which is a pattern."""
    with suppress(re.error):
        return not modules or len(modules) != 1 or bool(re.compile(modules[0]))
    return False


RULES = [
    Rule(
        "error", "fp16", lambda s: s.fp16 and s.use_cpu, "is computed on GPUs alone, and accelerate ignores it on a CPU"
    ),
    Rule(
        "error",
        "use_transformers_continuous_batching",
        lambda s: s.use_transformers_continuous_batching and s.fp16,
        "turns the trained weights into float16, whose gradients cannot be scaled (fp16)",
    ),
]
PROGRAM_RULES = [
    without("use_peft", "lora_.* use_dora use_rslora"),
    without("load_in_4bit", "bnb_4bit_.* use_bnb_.*"),
    Rule(
        "error",
        "lora_target_modules",
        lambda s: not _is_pattern(s.lora_target_modules),
        "is not a regular expression",
        "use all-linear, or names of modules",
    ),
    Rule(
        "warning",
        "lora_dropout",
        lambda s: s.use_peft and s.beta and s.lora_dropout,
        "with beta={beta}: the KL takes in the noise of the dropout",
        "lora_dropout: 0.0",
    ),
    Rule(
        "warning",
        "lora_alpha",
        # TRL's page "LoRA without regret" trains rank 1 with alpha 32.
        lambda s: s.use_peft and s.lora_r > 4 and s.lora_alpha > 8 * s.lora_r,
        "scales the adapter up by more than 8 (lora_alpha / lora_r, lora_r={lora_r})",
        "lora_alpha: twice lora_r",
    ),
    # AReaL (pull request 1634): 1.7e-5 spoiled a 1.5B whose weights are in float32, and 6e-6 was good. TRL, RL2 and
    # prime-rl (issue 841) have 1e-6.
    Rule(
        "warning",
        "learning_rate",
        lambda s: not s.use_peft and "adam" in s.optim and s.learning_rate > 1e-5,
        "is high for all weights: others use 1e-6 to 6e-6",
        "learning_rate: 1e-6, or use_peft: true",
    ),
    # An adapter hardly changes in a few hundred steps at such a rate.
    Rule(
        "warning",
        "learning_rate",
        lambda s: s.use_peft and s.learning_rate < 5e-06,
        "is so low that an adapter barely changes in a few hundred steps",
        "learning_rate: 1e-5",
    ),
    Rule(
        "error",
        "sync_ref_model",
        lambda s: s.sync_ref_model and s.use_peft,
        "cannot work with use_peft: TRL loads no second model with an adapter",
        "use reference_refresh_steps",
    ),
    Rule(
        "error",
        "load_in_4bit load_in_8bit",
        lambda s: (s.load_in_4bit or s.load_in_8bit) and not s.use_peft,
        "cannot be trained without an adapter",
        "set use_peft to true",
    ),
    Rule(
        "error",
        "dtype",
        lambda s: s.dtype == "float16" and not s.use_peft,
        "would train float16 weights, whose gradients cannot be scaled",
        "set dtype: float32 (fp16: true still multiplies in float16), or use_peft: true",
    ),
    Rule(
        "error",
        "vllm_share_weights",
        lambda s: s.vllm_share_weights and s.adapter,
        "does not work with adapter, whose base is loaded before vLLM",
    ),
    # bf16: null is bfloat16 if the GPU has it.
    Rule(
        "error",
        "dtype",
        lambda s: s.dtype == "float16" and s.use_peft and s.bf16 is False and not s.fp16,
        "without fp16 has no loss scale, so that small gradients become zero",
        "set dtype: float32, or fp16: true on a GPU",
    ),
    *(
        has_field("model_init_kwargs", key, field)
        for key, field in {
            "dtype": "dtype",
            "torch_dtype": "dtype",
            "attn_implementation": "attn_implementation",
            "trust_remote_code": "trust_remote_code",
            "revision": "model_revision",
            "quantization_config": "load_in_4bit",
        }.items()
    ),
]
