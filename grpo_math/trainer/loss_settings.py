"""Read the settings of the loss where TRL's loss reads them, and find terms that TRL's loss lacks."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from grpo_math.algorithm.losses import LossSettings
from grpo_math.errors import ConfigError
from grpo_math.settings.own import TrainerFields

if TYPE_CHECKING:
    from grpo_math.trainer.config import MathGRPOConfig
    from grpo_math.trainer.trl_trainer import TrlTrainer

# TRL reads these from the trainer. A callback may change them, as it may change an argument.
ATTRIBUTES = (
    *("beta", "loss_type", "epsilon_low", "epsilon_high", "importance_sampling_level", "off_policy_mask_threshold"),
    *("max_completion_length", "router_aux_loss_coef", "vllm_importance_sampling_mode"),
    *("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"),
)
OWN_FIELDS = {one.name for one in fields(TrainerFields)}
COMPUTED = ("entropy_coef", "vllm_importance_sampling_correction", "on_policy", "trained_share")
# TRL reads all others from its arguments. A script's arguments may lack our own.
TRL_FIELDS = {one.name for one in fields(LossSettings)}.difference(ATTRIBUTES, COMPUTED)


@contextmanager
def without_advice_about_luspo(settings: Any) -> Iterator[None]:
    """Drop TRL's advice about the loss type luspo, which is for its clip: settings/loss.py has our own."""
    logger = logging.getLogger("trl.trainer.grpo_trainer")

    def keep(record: logging.LogRecord) -> bool:
        return settings.effective_surrogate == "clip" or "`'luspo'`" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def loss_settings(trainer: "TrlTrainer", settings: "MathGRPOConfig") -> LossSettings:
    """Return the settings of the next optimizer step, or of an evaluation."""
    coefficient = trainer.entropy_coef if trainer._entropy_bonus_enabled else None
    if trainer.use_adaptive_entropy and trainer._last_world_entropy > trainer.args.entropy_target:
        coefficient = 0.0
    rollout_steps = trainer.args.steps_per_generation * trainer.num_iterations
    trains, trained = trainer.model.training, settings.train_completions
    return LossSettings(
        **{name: getattr(trainer, name) for name in ATTRIBUTES},
        **{name: getattr(settings if name in OWN_FIELDS else trainer.args, name) for name in TRL_FIELDS},
        entropy_coef=coefficient,
        vllm_importance_sampling_correction=trainer.use_vllm and trainer.vllm_importance_sampling_correction,
        on_policy=trains and trainer.args.gradient_accumulation_steps % rollout_steps == 0,
        trained_share=trained / trainer.num_generations if trains and trained else 1.0,
    )


def update_entropy_coef(trainer: "TrlTrainer", entropy: float) -> None:
    """Move the adaptive coefficient of the entropy bonus after a step with this entropy (nats per token)."""
    args = trainer.args
    if not trainer.use_adaptive_entropy:
        return
    # As in TRL: above the target the coefficient falls, and the bonus is left out.
    if entropy <= args.entropy_target:
        trainer.entropy_coef = min(trainer.entropy_coef + args.entropy_coef_delta, args.entropy_coef_max)
    else:
        trainer.entropy_coef = max(trainer.entropy_coef - args.entropy_coef_delta, args.entropy_coef_min)
    trainer._last_world_entropy = entropy


def micro_batch_terms(trainer: "TrlTrainer") -> list[str]:
    """Return the terms of the loss that are a mean or a quantile over TRL's micro-batch."""
    terms = {
        "router_aux_loss_coef": trainer.aux_loss_enabled,
        "an entropy bonus": trainer._entropy_bonus_enabled,
        "top_entropy_quantile": trainer.top_entropy_quantile < 1.0,
    }
    return [name for name, applies in terms.items() if applies]


def exceeds_trl_loss(trainer: "TrlTrainer", settings: "MathGRPOConfig") -> bool:
    """Return True if the loss has a term that TRL's lacks."""
    has_other_kl = trainer.beta != 0.0 and settings.kl_estimator != "k3"
    return bool(
        settings.surrogate != "clip" or trainer.loss_type == "prompt_mean" or has_other_kl or settings.train_completions
    )


def refuse_added_terms(trainer: "TrlTrainer", settings: "MathGRPOConfig", cause: str) -> None:
    """Raise `ConfigError` if the loss needs a term that TRL's lacks. ``cause``: why TRL computes the loss."""
    if exceeds_trl_loss(trainer, settings):
        raise ConfigError(
            "surrogate",
            settings.surrogate,
            f"does not work with {cause}",
            "use clip, with kl_estimator k3, another loss_type than prompt_mean, and without train_completions",
        )
