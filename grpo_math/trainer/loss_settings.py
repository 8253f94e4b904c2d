"""The settings of the loss, from the attributes and arguments that TRL's loss reads."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from grpo_math.algorithm.losses import LossSettings

if TYPE_CHECKING:
    from grpo_math.trainer.config import MathGRPOConfig

# TRL reads these from the trainer. A callback may change them, as it may change an argument.
ATTRIBUTES = (
    *("beta", "loss_type", "epsilon_low", "epsilon_high", "importance_sampling_level", "off_policy_mask_threshold"),
    *("max_completion_length", "router_aux_loss_coef", "vllm_importance_sampling_mode"),
    *("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
)
OURS = ("surrogate", "kl_estimator", "dppo_high", "dppo_low")
COMPUTED = ("entropy_coef", "vllm_importance_sampling_correction", "on_policy")
# TRL reads all others from its arguments.
ARGUMENTS = tuple(one.name for one in fields(LossSettings) if one.name not in (*ATTRIBUTES, *OURS, *COMPUTED))


def loss_settings(trainer: Any, settings: "MathGRPOConfig") -> LossSettings:
    """Return the settings of the next optimizer step, or of an evaluation."""
    coefficient = trainer.entropy_coef if trainer._entropy_bonus_enabled else None
    if trainer.use_adaptive_entropy and trainer._last_world_entropy > trainer.args.entropy_target:
        coefficient = 0.0
    rollout_steps = trainer.args.steps_per_generation * trainer.num_iterations
    return LossSettings(
        **{name: getattr(trainer, name) for name in ATTRIBUTES},
        **{name: getattr(settings, name) for name in OURS},
        **{name: getattr(trainer.args, name) for name in ARGUMENTS},
        entropy_coef=coefficient,
        vllm_importance_sampling_correction=trainer.use_vllm and trainer.vllm_importance_sampling_correction,
        on_policy=trainer.model.training and trainer.args.gradient_accumulation_steps % rollout_steps == 0,
    )
