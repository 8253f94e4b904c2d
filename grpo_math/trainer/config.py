"""`MathGRPOConfig`: TRL's `GRPOConfig` with additional fields. Every choice is checked before weights load.

>>> MathGRPOConfig("runs/x", baseline="leave_one_out").surrogate
'clip'
>>> MathGRPOConfig("runs/x", kl_estimator="k4")
Traceback (most recent call last):
...
grpo_math.errors.ConfigError: kl_estimator='k4' is not known: use one of k3, k1, k2, advantage

Contradictory settings are rejected, and a setting that another one makes ineffective gives a warning
(settings/rules.py).
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
from grpo_math.generation.models import gpu_dtype
from grpo_math.settings import rules
from grpo_math.settings.fields import fields as recipe_fields
from grpo_math.settings.recipe_field import setting
from grpo_math.system.redact import without_secrets
from grpo_math.system.replaced import replaced
from grpo_math.system.user_functions import is_user_function


@dataclass
class MathGRPOConfig(GRPOConfig):
    baseline: str = setting(
        "group_mean",
        "The baseline subtracted from a reward: group_mean, leave_one_out, or none. pass_at_k: the advantages of "
        "pass@k. Or module:function, which turns rewards (P, G) into advantages (P, G).",
        choices=("group_mean", "leave_one_out", "none", "pass_at_k", "module:function"),
    )
    k: int = setting(4, "The k of baseline pass_at_k: at most num_generations.", ge=2)
    surrogate: str = setting(
        "clip",
        "The loss of a token, which loss_type reduces. clip: PPO's. reinforce: the score function. gmpo: the geometric "
        "mean of clipped ratios (epsilon bounds their logarithms). cispo, sapo, vespo: TRL's. dppo, dppo_kl: the ratio "
        "to the sampler, without tokens that moved too far. Or module:function.",
        choices=("clip", "reinforce", "gmpo", "cispo", "dppo", "dppo_kl", "sapo", "vespo", "module:function"),
        shapes_rollout=True,
    )
    dppo_high: float = setting(
        0.2, "How far dppo lets the probability of a token with A > 0 rise (dppo_kl: in nats).", gt=0, le=1
    )
    dppo_low: float = setting(
        0.2, "How far dppo lets the probability of a token with A < 0 fall (dppo_kl: in nats).", gt=0, le=1
    )
    advantage_eps: float = setting(
        1e-4, "Added to the standard deviation that divides an advantage. Shipped recipes have 1e-6.", gt=0
    )
    reference_refresh_steps: int = setting(
        0, "Every this many optimizer steps, the reference of the KL term becomes the current policy; 0: never.", ge=0
    )
    kl_estimator: str = setting(
        "k3",
        "The estimator of the KL to the reference (its weight is beta): k3 (TRL's), k1, k2, or advantage (k1 is taken "
        "from each token's advantage).",
        choices=("k3", "k1", "k2", "advantage"),
    )
    reference_model: str | None = setting(
        None,
        "Another model with the same tokenizer as the reference of the KL term: a folder, a Hub id, or the "
        "http://HOST:PORT of a vLLM server.",
    )
    reference_dtype: str | None = setting(
        None, "The number format of reference_model. Default: the model's.", choices=("bfloat16", "float16", "float32")
    )
    reference_in_4bit: bool = setting(False, "Load reference_model in 4 bit (nf4).")
    resample_groups: int = setting(
        0,
        "Dynamic sampling, as in DAPO: extra rounds in which groups that are all correct or all wrong are "
        "replaced by fresh prompts; 0: none.",
        ge=0,
    )
    pack_updates: bool = setting(
        True,
        "Compute the prompt of a group once, compute no padding, and skip completions whose advantage is zero. "
        "The gradient is the same; false computes as TRL does.",
    )
    max_tokens_per_micro_batch: int = setting(
        0,
        "The most tokens in one pass of a packed update; a longer completion stays whole. 0: as many as TRL's "
        "padded micro-batch would have.",
        ge=0,
    )
    activation_offloading: bool = setting(
        False, "Keep what gradient checkpointing saves of each layer in pinned main memory, as in TRL's SFTTrainer."
    )
    longest_first: bool | None = setting(
        None,
        "Compute the largest possible micro-batch before the first step, so that running out of memory shows at "
        "once. Default: on a GPU.",
    )
    max_nonfinite_steps: int = setting(
        10,
        "A step whose gradient is not finite changes no weight. This many of them in a row end the run, with a "
        "checkpoint.",
        ge=1,
    )
    grade_timeout: float = setting(5.0, "Seconds of CPU time for grading one answer.", gt=0)
    vllm_sync: str = setting(
        "adapter",
        "The weights sent to vLLM when a PEFT adapter is trained. adapter: the adapter alone. merged: every "
        "weight, as TRL does.",
        choices=("adapter", "merged"),
    )
    vllm_share_weights: bool = setting(
        False,
        "Train an adapter on the weights of a colocated vLLM engine, instead of on a second copy of the base. It needs "
        "vllm_mode: colocate, vllm_sync: adapter, one GPU per engine and, with load_in_4bit, use_bnb_nested_quant.",
    )
    geometric_mask_low: float = setting(
        0.99, "With geometric_mask: the lowest mean ratio to vLLM of a kept completion. SkyRL's bounds.", gt=0, le=1
    )
    geometric_mask_high: float = setting(1.01, "The highest mean ratio.", ge=1)
    geometric_mask_weight: str = setting(
        "one", "A kept completion's weight: one, or token_truncate's of each token.", choices=("one", "token_truncate")
    )
    staleness: int = setting(
        0,
        "1: the vLLM server samples the next batch while this one is trained on, and the loss is corrected for "
        "that. 0: they take turns.",
        ge=0,
        le=1,
    )

    def __post_init__(self) -> None:
        # TRL's default would turn bf16 on for a CPU, too, and transformers would then refuse to start.
        if self.bf16 is None:
            dtype = gpu_dtype()
            self.fp16 = self.fp16 or (dtype == "float16" and not self.use_cpu)
            self.bf16 = dtype == "bfloat16" and not self.fp16
        # Before TRL's checks: transformers' checks start the device, and TRL makes some of these only after a rollout.
        for name in ("log_level", "log_level_replica"):
            setattr(self, name, str(getattr(self, name)).lower())
        # A subclass may have more fields, under names that only a recipe has.
        for name in MathGRPOConfig.__dataclass_fields__:
            recipe_fields()[name].check_in_script(getattr(self, name))
        rules.refuse(vars(self))
        if is_user_function(self.baseline):
            try_function(self.baseline, self.num_generations or 2)
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
TRL_EQUAL: dict[str, Any] = {
    **{one.name: one.default for one in fields(MathGRPOConfig) if one.name in MathGRPOConfig.__annotations__},
    "vllm_sync": "merged",
}


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
