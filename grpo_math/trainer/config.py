"""`MathGRPOConfig`: TRL's `GRPOConfig` and the fields that it lacks, every choice checked before weights load.

>>> MathGRPOConfig("runs/x", baseline="leave_one_out").surrogate
'clip'
>>> MathGRPOConfig("runs/x", surrogate="ppo")
Traceback (most recent call last):
...
grpo_math.errors.ConfigError: surrogate='ppo' is not known: use one of clip, reinforce

A field, ours or TRL's, that the loss would not read because of another one is refused, not ignored.

Does not repeat a field of TRL, and checks TRL's own only where they meet in the loss.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from typing import Any

from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig

from grpo_math.errors import ConfigError, one_of
from grpo_math.run.redact import is_address
from grpo_math.trainer.advantages import BASELINES, SCALES
from grpo_math.trainer.losses import CLIPPED, KL_ESTIMATORS, LOSS_TYPES, SURROGATES

LONG_SEQUENCES = ("truncate", "mask")
VLLM_SYNCS = ("adapter", "merged")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")

# With these values `MathGRPOTrainer` trains what `GRPOTrainer` trains. They stand in for a plain `GRPOConfig`.
TRL_EQUAL: dict[str, Any] = {
    "baseline": "group_mean",
    "surrogate": "clip",
    "advantage_eps": 1e-4,
    "reference_refresh_steps": 0,
    "kl_estimator": "k3",
    "resample_groups": 0,
    "pack_updates": True,
    "update_token_budget": 0,
    "max_seq_length_train": 0,
    "long_sequences": "truncate",
    "activation_offloading": False,
    "longest_first": None,
    "max_nonfinite_steps": 10,
    "allow_float16": False,
    "grade_timeout": 5.0,
    "vllm_sync": "merged",
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
        metadata={"help": "Added to the standard deviation that an advantage is divided by. TRL's own value is 1e-4."},
    )
    reference_refresh_steps: int = field(
        default=0,
        metadata={
            "help": "Every this many optimizer steps, the reference of the KL term becomes the current policy, with "
            "full fine-tuning and with LoRA; 0: never."
        },
    )
    kl_estimator: str = field(
        default="k3",
        metadata={
            "help": "How the KL to the reference is estimated (its weight is beta): k3 (TRL's), k1 or k2. Their "
            "gradients differ, and depend on use_bias_correction_kl: see docs/algorithms.md."
        },
    )
    resample_groups: int = field(
        default=0,
        metadata={
            "help": "Dynamic sampling, as in DAPO: at most this many extra rounds in which groups that are all right "
            "or all wrong by verdict are replaced by fresh prompts; 0: none."
        },
    )
    pack_updates: bool = field(
        default=True,
        metadata={
            "help": "Compute the prompt of a group once, in generation and in the update, compute no padding, and "
            "skip completions whose advantage is zero. The gradient is the same; false computes as TRL does."
        },
    )
    update_token_budget: int = field(
        default=0,
        metadata={
            "help": "The most tokens in one forward and backward pass of a packed update; a longer completion stays "
            "whole. 0: as many as TRL's padded micro-batch would have."
        },
    )
    max_seq_length_train: int = field(
        default=0,
        metadata={
            "help": "The most tokens of prompt and completion that are trained on. Sampling and grading still see "
            "the whole completion, and the share of longer ones is logged. 0: no limit."
        },
    )
    long_sequences: str = field(
        default="truncate",
        metadata={
            "help": "What to do with a completion over max_seq_length_train. truncate: train on its first tokens. "
            "mask: leave it out of the loss."
        },
    )
    activation_offloading: bool = field(
        default=False,
        metadata={
            "help": "Keep what gradient checkpointing saves of each layer in pinned main memory, copied while the "
            "GPU computes. This is TRL's own offloading, as in its SFTTrainer."
        },
    )
    longest_first: bool | None = field(
        default=None,
        metadata={
            "help": "Before the first step, compute the largest micro-batch that can occur and discard the result, "
            "so that running out of memory shows at once. Default: true on a GPU, false on a CPU."
        },
    )
    max_nonfinite_steps: int = field(
        default=10,
        metadata={
            "help": "A step whose gradient is not finite changes no weight. This many of them in a row end the run, "
            "with a checkpoint."
        },
    )
    allow_float16: bool = field(
        default=False,
        metadata={
            "help": "Allow fp16. It has given NaN with accumulation on GPUs without bfloat16 (T4, V100), so fp16 is "
            "refused unless this is true."
        },
    )
    grade_timeout: float = field(
        default=5.0,
        metadata={"help": "Seconds for grading one answer. After that its verdict is timeout, not wrong."},
    )
    vllm_sync: str = field(
        default="adapter",
        metadata={
            "help": "What is sent to vLLM when a PEFT adapter is trained. adapter: the adapter alone. merged: every "
            "weight, with the adapter merged in, as TRL does. Full fine-tuning always sends the weights."
        },
    )

    def __post_init__(self) -> None:
        if self.bf16 is None:  # TRL's default asks for it on a CPU too, where transformers then refuses to start
            self.bf16 = not self.fp16 and is_torch_bf16_gpu_available()
        self._check()
        super().__post_init__()
        if self.activation_offloading and self.device.type == "cpu":
            raise ConfigError(
                "activation_offloading", True, "has no GPU here whose memory it could spare", "leave it out"
            )
        self._check_refresh_meets_rollouts()

    def _check(self) -> None:
        scale: Any = self.scale_rewards  # TRL also takes true and false
        one_of("baseline", self.baseline, tuple(BASELINES))
        one_of("scale_rewards", {True: "group", False: "none"}.get(scale, scale), tuple(SCALES))
        one_of("surrogate", self.surrogate, SURROGATES)
        one_of("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        # TRL finds these four only once a rollout has been sampled.
        one_of("loss_type", self.loss_type, LOSS_TYPES)
        one_of("importance_sampling_level", self.importance_sampling_level, ("token", "sequence"))
        one_of("multi_objective_aggregation", self.multi_objective_aggregation, AGGREGATIONS)
        if not 0.0 <= self.top_entropy_quantile <= 1.0:
            raise ConfigError(
                "top_entropy_quantile", self.top_entropy_quantile, "is no share", "use a number from 0 to 1"
            )
        for name in ("advantage_eps", "grade_timeout"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(name, value, "is not a positive number", f"the default is {TRL_EQUAL[name]:g}")
        if self.multi_objective_aggregation == "normalize_then_sum":
            self._refuse("baseline", "multi_objective_aggregation='normalize_then_sum' has a baseline of its own")
            self._refuse("scale_rewards", "multi_objective_aggregation='normalize_then_sum' has a scale of its own")
            self._refuse("advantage_eps", "multi_objective_aggregation='normalize_then_sum' uses TRL's own constant")
            self._refuse(
                "resample_groups", "multi_objective_aggregation='normalize_then_sum' normalizes what was drawn"
            )
        one_of("long_sequences", self.long_sequences, LONG_SEQUENCES)
        for name in ("update_token_budget", "resample_groups", "max_seq_length_train"):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "is negative", "give 0 or more")
        if self.max_nonfinite_steps < 1:
            raise ConfigError("max_nonfinite_steps", self.max_nonfinite_steps, "ends every run", "give 1 or more")
        if not self.max_seq_length_train:
            self._refuse("long_sequences", "max_seq_length_train=0 takes every length")
        if not self.gradient_checkpointing:
            self._refuse("gradient_checkpointing_kwargs", "gradient_checkpointing=False")
        if self.activation_offloading and not self.gradient_checkpointing:
            reason = "without gradient_checkpointing would copy all that every layer saves"
            raise ConfigError("activation_offloading", True, reason, "set gradient_checkpointing to true")
        if self.fp16 and not self.allow_float16:
            reason = "has given NaN with accumulation on GPUs without bfloat16 (T4, V100)"
            raise ConfigError("fp16", True, reason, "use bf16, or neither (float32), or add allow_float16: true")
        if not self.fp16:
            self._refuse("allow_float16", "fp16=False")
        if not self.pack_updates:
            self._refuse("update_token_budget", "pack_updates=False has no budget")
        for name in ("entropy_coef", "use_adaptive_entropy", "top_entropy_quantile"):
            if getattr(self, name) != self.__dataclass_fields__[name].default:
                why = f"{name}={getattr(self, name)} looks at whole micro-batches of per_device_train_batch_size"
                self._refuse("update_token_budget", why)
        self._check_loss()
        self._check_kl()
        self._check_vllm()

    def _check_loss(self) -> None:
        if self.surrogate == "reinforce":
            why = "surrogate='reinforce' holds the ratio at 1"
            for name in ("epsilon", "epsilon_high", "delta", "off_policy_mask_threshold", "importance_sampling_level"):
                self._refuse(name, why)
            if self.loss_type not in CLIPPED:
                alike = "grpo" if self.loss_type == "sapo" else "dapo"
                reason = f"is a weight of the ratio, which {why.replace('holds the ratio', 'holds')}"
                raise ConfigError("loss_type", self.loss_type, reason, f"{alike} reduces tokens in the same way")
        elif self.loss_type == "luspo" and self.importance_sampling_level == "token":
            reason = "is defined for the ratio of a sequence, not for importance_sampling_level='token'"
            raise ConfigError("loss_type", "luspo", reason, "set importance_sampling_level to sequence")
        clip = "epsilon" if self.epsilon_high is None else "epsilon_high"
        upper = 1 + getattr(self, clip)
        if self.delta is not None and self.delta <= upper:
            reason = f"caps the ratio below the {upper:g} that {clip}={getattr(self, clip):g} lets through"
            raise ConfigError("delta", self.delta, reason, f"give a number above {upper:g}, or leave it out")
        if self.loss_type not in CLIPPED:
            self._refuse("delta", f"loss_type={self.loss_type!r} does not clip")
        if self.loss_type in ("sapo", "vespo"):
            self._refuse("epsilon", f"loss_type={self.loss_type!r} does not clip")
            self._refuse("epsilon_high", f"loss_type={self.loss_type!r} does not clip")
        if self.loss_type == "cispo" and self.epsilon_high is not None:
            self._refuse("epsilon", "loss_type='cispo' has an upper bound alone, which epsilon_high gives")
        if self.loss_type != "sapo":
            for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
                self._refuse(name, f"loss_type={self.loss_type!r} is not sapo")
        if self.loss_type != "vespo":
            for name in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"):
                self._refuse(name, f"loss_type={self.loss_type!r} is not vespo")
        else:
            self._refuse("importance_sampling_level", "loss_type='vespo' weighs the sequence itself")
            mode = self.vllm_importance_sampling_mode
            if self.use_vllm and self.vllm_importance_sampling_correction and not mode.startswith("token_"):
                reason = "needs the ratio of each token between vLLM and the model"
                remedy = f"set vllm_importance_sampling_mode (now {mode!r}) to token_truncate or token_mask"
                raise ConfigError("loss_type", "vespo", reason, remedy)
        if not self.use_adaptive_entropy:
            for name in ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"):
                self._refuse(name, "use_adaptive_entropy=False")
        elif self.entropy_coef_min > self.entropy_coef_max:
            reason = f"is above entropy_coef_max={self.entropy_coef_max:g}"
            raise ConfigError("entropy_coef_min", self.entropy_coef_min, reason, "give a smaller number")

    def _check_vllm(self) -> None:
        one_of("vllm_sync", self.vllm_sync, VLLM_SYNCS)
        urls = self.vllm_server_base_url
        if not self.use_vllm:
            self._refuse("vllm_sync", "use_vllm=False")
        elif urls and self.vllm_mode != "server":
            self._refuse("vllm_server_base_url", f"vllm_mode={self.vllm_mode!r} has no server")
        elif not urls and self.vllm_mode == "server" and not is_address(f"http://{self.vllm_server_host}"):
            raise ConfigError("vllm_server_host", self.vllm_server_host, "is no host", "give a name or an IP address")
        elif urls and "," in urls:
            if self.vllm_sync == "merged":
                reason = "names several servers, and vllm_sync='merged' sends weights to one"
                raise ConfigError("vllm_server_base_url", urls, reason, "name one server")
            if len(set(urls.split(","))) < len(urls.split(",")):
                raise ConfigError("vllm_server_base_url", urls, "names a server twice", "name each once")
        if not self.vllm_importance_sampling_correction:
            for name in ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"):
                self._refuse(name, "vllm_importance_sampling_correction=False")
        if self.vllm_structured_outputs_regex:
            try:
                re.compile(self.vllm_structured_outputs_regex)
            except re.error as error:
                value, reason = self.vllm_structured_outputs_regex, f"is no regular expression ({error})"
                raise ConfigError("vllm_structured_outputs_regex", value, reason, "mend it") from None
        for url in (urls or "").split(",") if urls else ():
            if not is_address(url.strip()):
                reason = f"holds {url.strip()!r}, which is no address"
                raise ConfigError("vllm_server_base_url", urls, reason, "write it as http://127.0.0.1:8000")

    def _check_kl(self) -> None:
        if self.beta == 0.0:
            for name in ("kl_estimator", "use_bias_correction_kl", "sync_ref_model"):
                self._refuse(name, "beta=0 leaves the KL term out")
        if not self.sync_ref_model:
            for name in ("ref_model_mixup_alpha", "ref_model_sync_steps"):
                self._refuse(name, "sync_ref_model=False")
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
