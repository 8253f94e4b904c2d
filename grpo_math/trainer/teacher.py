"""A teacher (``reference_model``): another model as the reference of the KL term or of the advantages.

TRL scores a teacher as any reference.
"""

from typing import Any

from trl.trainer.utils import add_fused_lm_head, create_model_from_path

from grpo_math.errors import ConfigError
from grpo_math.generation.models import check_reference, loading, model_path, tokenizer_or_own
from grpo_math.trainer.config import MathGRPOConfig


def check_teacher(settings: MathGRPOConfig, model: Any, tokenizer: Any) -> None:
    """Raise `ConfigError` for a teacher that cannot be scored with the tokens of ``model``. Loads no weights.

    ``tokenizer``: the trainer's ``processing_class``, or None for the tokenizer of the model.
    """
    name = str(settings.reference_model)
    plugin: Any = settings.deepspeed_plugin
    # settings/rules.py refuses FSDP. The stage may be in a file of DeepSpeed.
    if plugin is not None and plugin.zero_stage == 3:
        raise ConfigError("reference_model", name, "does not work with ZeRO-3", "use ZeRO-2 or DDP")
    tokenizer = tokenizer_or_own(tokenizer, model)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    check_reference(name, tokenizer)


def load_teacher(settings: MathGRPOConfig, policy: Any, accelerator: Any) -> Any:
    """Return the reference model of a policy, as TRL prepares a reference."""
    options: dict[str, Any] = {"device_map": None, "trust_remote_code": False, "dtype": policy.dtype}
    name = str(settings.reference_model)
    # The teacher's family may not support the policy's attention implementation.
    with loading(name, "weights", "reference_model"):
        model = create_model_from_path(
            model_path(name), attn_implementation=policy.config._attn_implementation, **options
        )
    model.requires_grad_(False)
    add_fused_lm_head(model, temperature=settings.temperature)
    return accelerator.prepare_model(model, evaluation_mode=True)
