"""A reference of another name (``reference_model``): a teacher, whose log-probs the KL term reads.

With k1, bias correction and no rewards, the KL term alone is on-policy distillation (arXiv 2306.13649): its mean
gradient is that of the reverse KL of each token (`algorithm/losses.py`).

TRL scores it as any reference.
"""

from typing import Any

import torch
from transformers import BitsAndBytesConfig
from trl.trainer.utils import add_fused_lm_head, create_model_from_path

from grpo_math.errors import ConfigError
from grpo_math.generation.models import check_reference, load_tokenizer, loading, model_path
from grpo_math.trainer.config import MathGRPOConfig


def refuse_teacher(name: str, model: Any, args: Any, tokenizer: Any) -> None:
    """Raise `ConfigError` for a teacher that cannot be scored with the tokens of ``model``. Loads no weights.

    ``tokenizer``: the trainer's ``processing_class``, or None for the tokenizer of the model.
    """
    # settings/rules.py refuses FSDP. The stage may be in a file of DeepSpeed.
    if args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3:
        raise ConfigError("reference_model", name, "does not work with ZeRO-3", "use ZeRO-2 or DDP")
    if tokenizer is None:
        tokenizer = load_tokenizer(model if isinstance(model, str) else model.config._name_or_path)
    check_reference(name, getattr(tokenizer, "tokenizer", tokenizer))


def load_teacher(settings: MathGRPOConfig, policy: Any, accelerator: Any) -> Any:
    """Return the reference model of a policy, as TRL prepares a reference."""
    dtype = getattr(torch, settings.reference_dtype) if settings.reference_dtype else policy.dtype
    options: dict[str, Any] = {"device_map": None, "trust_remote_code": False, "dtype": dtype}
    if settings.reference_in_4bit:
        options |= {
            "device_map": {"": accelerator.device},
            "quantization_config": BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
            ),
        }
    name = str(settings.reference_model)
    # A family may not have the policy's attention.
    with loading(name, "weights", "reference_model"):
        model = create_model_from_path(
            model_path(name), attn_implementation=policy.config._attn_implementation, **options
        )
    model.requires_grad_(False)
    add_fused_lm_head(model, temperature=settings.temperature)
    return accelerator.prepare_model(model, evaluation_mode=True)
