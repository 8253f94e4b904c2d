"""`MathGRPOConfig`: TRL's `GRPOConfig` with additional fields. Every choice is checked before weights load.

>>> MathGRPOConfig("runs/x", baseline="leave_one_out").surrogate
'clip'
>>> MathGRPOConfig("runs/x", kl_estimator="k4")
Traceback (most recent call last):
...
grpo_math.errors.ConfigError: kl_estimator='k4' is not known: use one of k3, k1, k2, advantage

Contradictory settings are rejected, and a setting that another one makes ineffective gives a warning
(the rules of settings/).
"""

import math
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

from trl import GRPOConfig

from grpo_math.algorithm.advantages import try_function
from grpo_math.algorithm.losses import try_surrogate
from grpo_math.errors import ConfigError
from grpo_math.generation.dtypes import gpu_dtype, number_formats
from grpo_math.redact import without_secrets
from grpo_math.settings import rules
from grpo_math.settings.fields import fields as recipe_fields
from grpo_math.settings.own import TrainerFields
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.replaced import replaced
from grpo_math.system.user_functions import is_user_function


@dataclass
class MathGRPOConfig(TrainerFields, GRPOConfig):
    def __post_init__(self) -> None:
        # TRL's default would turn bf16 on for a CPU, too, and transformers would then refuse to start.
        if self.bf16 is None:
            half = "float32" if self.use_cpu else gpu_dtype()
            _, self.bf16, self.fp16 = number_formats(RunSettings({"bf16": None, "fp16": self.fp16}), half)
        # Before TRL's checks: transformers' checks start the device, and TRL makes some of these only after a rollout.
        for name in ("log_level", "log_level_replica"):
            setattr(self, name, str(getattr(self, name)).lower())
        # A subclass may have more fields, under names that only a recipe has.
        for name in MathGRPOConfig.__dataclass_fields__:
            recipe_fields()[name].check_in_script(getattr(self, name))
        rules.refuse(self)
        if is_user_function(self.baseline):
            try_function(self.baseline, self.train_completions or self.num_generations or 2)
        if is_user_function(self.surrogate):
            try_surrogate(self.surrogate)
        super().__post_init__()
        if self.activation_offloading and self.device.type == "cpu":
            raise ConfigError("activation_offloading", True, "has no GPU here to save memory on", "leave it out")
        # Reference log-probs are computed once per rollout, so a refresh must fall between two rollouts.
        rollout = (self.steps_per_generation or 1) * self.num_iterations
        # A rollout and an optimizer step end together after the least common multiple of their training steps.
        updates = rollout // math.gcd(rollout, self.gradient_accumulation_steps)
        if self.reference_refresh_steps % updates:
            raise ConfigError(
                "reference_refresh_steps",
                self.reference_refresh_steps,
                f"falls within a rollout, which serves {updates} optimizer steps "
                f"(num_iterations={self.num_iterations}, steps_per_generation={self.steps_per_generation})",
                f"use a multiple of {updates}",
            )


# With these values `MathGRPOTrainer` trains what `GRPOTrainer` trains.
TRL_EQUAL: dict[str, Any] = {**{one.name: one.default for one in fields(TrainerFields)}, "vllm_sync": "merged"}


def as_math_config(args: GRPOConfig) -> MathGRPOConfig:
    """Return the arguments as `MathGRPOConfig`. A plain `GRPOConfig` is copied, with our fields at TRL-equal values.

    >>> as_math_config(GRPOConfig("runs/x", use_cpu=True, bf16=False)).advantage_eps
    0.0001
    """
    if isinstance(args, MathGRPOConfig):
        return args
    # Without the constructor: nothing is checked or computed a second time.
    settings = object.__new__(MathGRPOConfig)
    # Our values win: a subclass of `GRPOConfig` may have fields with the same names.
    vars(settings).update({**vars(args), **TRL_EQUAL})
    return settings


def pickled_without_tokens(args: Any) -> AbstractContextManager[None]:
    """Make the pickles of training arguments contain no secret, at any depth, inside this context.

    transformers pickles the arguments into folders that may be shared, and pushes with their token.

    >>> import pickle
    >>> args = GRPOConfig("runs/x", use_cpu=True, bf16=False, hub_token="hf_x", model_init_kwargs={"token": "hf_x"})
    >>> with pickled_without_tokens(args):
    ...     copied, token = pickle.loads(pickle.dumps(args)), args.hub_token
    >>> copied.hub_token, copied.model_init_kwargs, token
    (None, {}, 'hf_x')
    """
    shared = copy(args)
    vars(shared).update({**dict.fromkeys(vars(args)), **without_secrets(vars(args))})
    # pickle reads this method from the object.
    return replaced(args, __reduce_ex__=shared.__reduce_ex__)
