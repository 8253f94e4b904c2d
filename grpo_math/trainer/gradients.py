"""Prepare a model's gradients for training: frozen and unused parameters, 4 bit on a CPU."""

from typing import TYPE_CHECKING, Any

from grpo_math.errors import ConfigError

if TYPE_CHECKING:
    from grpo_math.trainer.config import MathGRPOConfig
    from grpo_math.trainer.trl_trainer import TrlTrainer


def keep_4bit_gradients(model: Any) -> None:
    """Keep bitsandbytes from repacking 4-bit weights in evaluation mode, which it does on a CPU with AVX512-BF16.

    The products with repacked weights have no gradient, also when the model is trained again.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    >>> model[0].support_avx512bf16_for_cpu = True  # as bitsandbytes sets it
    >>> keep_4bit_gradients(model)
    >>> [getattr(module, "support_avx512bf16_for_cpu", None) for module in model]
    [False, None]
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def has_unused_parameters(model: Any, args: Any, processes: int) -> bool:
    """Return True if DDP has to look for parameters without a gradient. DDP warns if it looks and finds none."""
    # Text leaves the vision tower of a model unused.
    unused = bool(set(model.config.sub_configs) - {"text_config"})
    kwargs = args.gradient_checkpointing_kwargs or {}
    reentrant = args.gradient_checkpointing and kwargs.get("use_reentrant")
    if unused and reentrant and processes > 1 and all(p.requires_grad for p in model.parameters()):
        raise ConfigError(
            "gradient_checkpointing_kwargs",
            kwargs,
            "DDP cannot train a model whose vision tower gets no gradient",
            "set use_reentrant to false",
        )
    return unused and not reentrant


def refuse_frozen(trainer: "TrlTrainer", settings: "MathGRPOConfig") -> None:
    """Raise `ConfigError` if no parameter of the optimizer requires a gradient: nothing would be trained."""
    parameters = [one for group in trainer.optimizer.param_groups for one in group["params"]]
    # ZeRO-3 empties its groups between steps, and an optimizer that steps in each backward pass has a dummy.
    if trainer.is_deepspeed_enabled or settings.steps_in_backward:
        parameters = list(trainer.model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise ConfigError(
            "model",
            type(trainer.accelerator.unwrap_model(trainer.model)).__name__,
            "is frozen: no parameter of the optimizer requires a gradient",
            "load an adapter with PeftModel.from_pretrained(..., is_trainable=True), or unfreeze weights",
        )
