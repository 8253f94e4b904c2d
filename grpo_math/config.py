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
from dataclasses import dataclass, field
from typing import Any

from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig

from grpo_math import advantages
from grpo_math.errors import ConfigError, one_of
from grpo_math.losses import KL_ESTIMATORS, SURROGATES

# With these values `MathGRPOTrainer` trains what `GRPOTrainer` trains. They stand in for a plain `GRPOConfig`.
TRL_EQUAL: dict[str, Any] = {
    "baseline": "group_mean",
    "surrogate": "clip",
    "advantage_eps": 1e-4,
    "kl_estimator": "k3",
    "pack_updates": True,
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
    kl_estimator: str = field(
        default="k3",
        metadata={
            "help": "How the KL to the reference is estimated, whose weight is beta: k3 (TRL's), k1, or k2. Their "
            "gradients differ, and change with use_bias_correction_kl: see grpo_math/losses.py."
        },
    )
    pack_updates: bool = field(
        default=True,
        metadata={
            "help": "Compute the prompt of a group once, in generation and in the update, compute no padding, and "
            "skip completions whose advantage is zero. The gradient is the same; false is TRL's own way."
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

    def _check(self) -> None:
        scale: Any = self.scale_rewards  # TRL also takes true and false
        advantages.check(self.baseline, {True: "group", False: "none"}.get(scale, scale))
        one_of("surrogate", self.surrogate, SURROGATES)
        one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        for name in ("advantage_eps", "grade_timeout"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(name, value, "is not a positive number", f"the default is {TRL_EQUAL[name]:g}")
        if self.multi_objective_aggregation == "normalize_then_sum":
            self._refuse("baseline", "multi_objective_aggregation='normalize_then_sum' has a baseline of its own")
            self._refuse("advantage_eps", "multi_objective_aggregation='normalize_then_sum' uses TRL's own constant")
        if self.beta == 0.0:
            self._refuse("kl_estimator", "beta=0 leaves the KL term out")
        if self.surrogate == "reinforce":
            why = "surrogate='reinforce' holds the ratio at 1"
            for name in ("epsilon", "epsilon_high", "delta", "off_policy_mask_threshold", "importance_sampling_level"):
                self._refuse(name, why)

    def _refuse(self, name: str, why: str) -> None:
        """A field that is not at its default although another setting would leave it without effect."""
        default = self.__dataclass_fields__[name].default
        if getattr(self, name) != default:
            raise ConfigError(name, getattr(self, name), f"would be ignored ({why})", f"leave it at {default!r}")
