"""`MathGRPOConfig`: TRL's `GRPOConfig` and the fields that it lacks, every choice checked before weights load.

>>> MathGRPOConfig("runs/x", baseline="leave_one_out").surrogate
'clip'
>>> MathGRPOConfig("runs/x", surrogate="ppo")
Traceback (most recent call last):
...
grpo_math.errors.ConfigError: surrogate='ppo' is not known: use one of clip, reinforce

Does not repeat a field of TRL, and does not check TRL's own fields except where one of ours cannot work with it.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig

from grpo_math.advantages import BASELINES
from grpo_math.errors import ConfigError, one_of
from grpo_math.losses import SURROGATES

# With these values `MathGRPOTrainer` trains what `GRPOTrainer` trains. They stand in for a plain `GRPOConfig`.
TRL_EQUAL: dict[str, Any] = {
    "baseline": "group_mean",
    "surrogate": "clip",
    "advantage_eps": 1e-4,
    "reference_refresh_steps": 0,
    "pack_updates": True,
    "update_token_budget": 0,
    "grade_timeout": 5.0,
}


@dataclass
class MathGRPOConfig(GRPOConfig):
    baseline: str = field(
        default="group_mean",
        metadata={"help": "What is subtracted from a reward: group_mean, leave_one_out, or none."},
    )
    surrogate: str = field(
        default="clip",
        metadata={"help": "clip: PPO's clipped ratio. reinforce: the score function, with the ratio held at 1."},
    )
    advantage_eps: float = field(
        default=1e-6,
        metadata={"help": "Added to the standard deviation that divides an advantage. TRL's own value is 1e-4."},
    )
    reference_refresh_steps: int = field(
        default=0,
        metadata={
            "help": "Make the reference of the KL term the current policy every so many optimizer steps, with full "
            "fine-tuning and with LoRA alike; 0: never."
        },
    )
    pack_updates: bool = field(
        default=True,
        metadata={
            "help": "Compute the prompt of a group once, in generation and in the update, compute no padding, and "
            "skip completions whose advantage is zero. The gradient is the same; false is TRL's own way."
        },
    )
    update_token_budget: int = field(
        default=0,
        metadata={
            "help": "Most tokens in one forward and backward pass of a packed update; a longer completion stays whole. "
            "0: as many as TRL's padded micro-batch would have."
        },
    )
    grade_timeout: float = field(
        default=5.0,
        metadata={"help": "Seconds for grading one answer; after that its verdict is timeout, not wrong."},
    )

    def __post_init__(self) -> None:
        if self.bf16 is None:  # TRL's default asks for it on a CPU too, where transformers then refuses to start
            self.bf16 = not self.fp16 and is_torch_bf16_gpu_available()
        self._check()
        super().__post_init__()
        self._check_refresh_meets_rollouts()

    def _check(self) -> None:
        one_of("baseline", self.baseline, tuple(BASELINES))
        one_of("surrogate", self.surrogate, SURROGATES)
        for name in ("advantage_eps", "grade_timeout"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(name, value, "is not a positive number", f"the default is {TRL_EQUAL[name]:g}")
        if self.multi_objective_aggregation == "normalize_then_sum":
            self._refuse("baseline", "multi_objective_aggregation='normalize_then_sum' has a baseline of its own")
            self._refuse("advantage_eps", "multi_objective_aggregation='normalize_then_sum' uses TRL's own constant")
        if self.update_token_budget < 0:
            raise ConfigError("update_token_budget", self.update_token_budget, "is negative", "give tokens, or 0")
        if not self.pack_updates:
            self._refuse("update_token_budget", "pack_updates=False has no budget")
        if self.entropy_coef or self.use_adaptive_entropy or self.top_entropy_quantile < 1.0:
            name = "top_entropy_quantile" if self.top_entropy_quantile < 1.0 else "entropy_coef"
            self._refuse("update_token_budget", f"{name} looks at whole micro-batches of per_device_train_batch_size")
        if self.surrogate == "reinforce":
            why = "surrogate='reinforce' holds the ratio at 1"
            for name in ("epsilon", "epsilon_high", "delta", "off_policy_mask_threshold", "importance_sampling_level"):
                self._refuse(name, why)

        if self.reference_refresh_steps:
            self._check_refresh()

    def _check_refresh(self) -> None:
        steps, sharded = self.reference_refresh_steps, os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        if steps < 0:
            reason, remedy = "is negative", "give 0 or more"
        elif self.beta == 0:
            reason, remedy = "has no reference to refresh (beta=0)", "set beta above 0, or leave this at 0"
        elif self.sync_ref_model:
            reason, remedy = "and sync_ref_model=True would both move the reference", "leave one of the two out"
        elif self.fsdp or sharded:
            reason, remedy = "does not work with fsdp", "use DeepSpeed, or leave it at 0"
        else:
            return
        raise ConfigError("reference_refresh_steps", steps, reason, remedy)

    def _check_refresh_meets_rollouts(self) -> None:
        """Reference log-probs are computed once a rollout, so a refresh must fall between two of them."""
        rollout = (self.steps_per_generation or 1) * self.num_iterations
        updates = rollout // math.gcd(rollout, self.gradient_accumulation_steps)
        if self.reference_refresh_steps % updates:
            raise ConfigError(
                "reference_refresh_steps",
                self.reference_refresh_steps,
                f"falls within a rollout, which serves {updates} optimizer steps (num_iterations={self.num_iterations},"
                f" steps_per_generation={self.steps_per_generation})",
                f"use a multiple of {updates}",
            )

    def _refuse(self, name: str, why: str) -> None:
        """A field that is not at its default although another setting would leave it without effect."""
        default = self.__dataclass_fields__[name].default
        if getattr(self, name) != default:
            raise ConfigError(name, getattr(self, name), f"would be ignored ({why})", f"leave it at {default!r}")
