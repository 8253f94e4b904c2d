"""What a `MathGRPOConfig` refuses: values that cannot be, and settings that another one would leave without effect.

Does not check what TRL and transformers refuse by themselves, with the field's name and before weights load.
"""

import math
import os
import re
from collections.abc import Mapping
from typing import Any

from accelerate.utils import DynamoBackend

from grpo_math.errors import ConfigError, one_of
from grpo_math.run.own import is_own
from grpo_math.run.redact import is_address
from grpo_math.trainer.advantages import BASELINES, SCALES, try_function
from grpo_math.trainer.losses import CLIPPED, KL_ESTIMATORS, LOSS_TYPES, SURROGATES, try_surrogate
from grpo_math.trainer.ranges import refuse_out_of_range

CHOICES = {
    "baseline": tuple(BASELINES),
    "scale_rewards": tuple(SCALES),
    "surrogate": SURROGATES,
    "kl_estimator": KL_ESTIMATORS,
    # TRL finds these three only once a rollout has been sampled.
    "loss_type": LOSS_TYPES,
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "long_sequences": ("truncate", "mask"),
    "vllm_sync": ("adapter", "merged"),
}

NUMBERS = (  # our own, and one that TRL looks at once a rollout has been sampled
    *("advantage_eps", "grade_timeout", "update_token_budget", "resample_groups", "max_seq_length_train"),
    *("max_nonfinite_steps", "reference_refresh_steps", "top_entropy_quantile", "staleness"),
)


def ignored(c: Any) -> list[tuple[Any, str, str]]:
    """A row: whether it holds; the fields that nothing reads then, which have to be at their defaults; why."""
    sums = c.multi_objective_aggregation == "normalize_then_sum"
    its = "multi_objective_aggregation='normalize_then_sum'"
    kind, no_clip, no_kl = f"loss_type={c.loss_type!r}", f"loss_type={c.loss_type!r} does not clip", c.beta == 0.0
    own, ratio = is_own(c.surrogate), "epsilon epsilon_high delta off_policy_mask_threshold importance_sampling_level"
    whole = "looks at whole micro-batches of per_device_train_batch_size"
    moved = [(name, getattr(c, name)) for name in ("entropy_coef", "use_adaptive_entropy", "top_entropy_quantile")]
    moved = [(name, value) for name, value in moved if value != c.__dataclass_fields__[name].default]
    upper = "loss_type='cispo' has an upper bound alone, which epsilon_high gives"
    adaptive = "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"
    no_server = c.use_vllm and c.vllm_server_base_url and c.vllm_mode != "server"
    correction = "vllm_importance_sampling_mode vllm_importance_sampling_clip_max"
    return [
        (sums, "baseline", f"{its} has a baseline of its own"),
        (sums, "scale_rewards", f"{its} has a scale of its own"),
        (sums, "advantage_eps", f"{its} uses TRL's own constant"),
        (sums, "resample_groups", f"{its} normalizes what was drawn"),
        (is_own(c.baseline), "scale_rewards advantage_eps", f"baseline={c.baseline!r} gives the advantages themselves"),
        (not c.max_seq_length_train, "long_sequences", "max_seq_length_train=0 takes every length"),
        (not c.gradient_checkpointing, "gradient_checkpointing_kwargs", "gradient_checkpointing=False"),
        (not c.fp16, "allow_float16", "fp16=False"),
        (not c.pack_updates, "update_token_budget", "pack_updates=False has no budget"),
        *((True, "update_token_budget", f"{name}={value} {whole}") for name, value in moved),
        (c.surrogate == "reinforce", ratio, "surrogate='reinforce' holds the ratio at 1"),
        (own, f"{ratio} top_entropy_quantile", f"surrogate={c.surrogate!r} is the whole loss of a token"),
        (c.loss_type not in CLIPPED, "delta", no_clip),
        (c.loss_type in ("sapo", "vespo"), "epsilon epsilon_high", no_clip),
        (c.loss_type == "cispo" and c.epsilon_high is not None, "epsilon", upper),
        (c.loss_type != "sapo", "sapo_temperature_pos sapo_temperature_neg", f"{kind} is not sapo"),
        (c.loss_type != "vespo", "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg", f"{kind} is not vespo"),
        (c.loss_type == "vespo", "importance_sampling_level", f"{kind} weighs the sequence itself"),
        (not c.use_adaptive_entropy, adaptive, "use_adaptive_entropy=False"),
        (no_kl, "kl_estimator use_bias_correction_kl sync_ref_model", "beta=0 leaves the KL term out"),
        (not c.sync_ref_model, "ref_model_mixup_alpha ref_model_sync_steps", "sync_ref_model=False"),
        (not c.use_vllm, "vllm_sync", "use_vllm=False"),
        (no_server, "vllm_server_base_url", f"vllm_mode={c.vllm_mode!r} has no server"),
        (not c.vllm_importance_sampling_correction, correction, "vllm_importance_sampling_correction=False"),
    ]


def refuse(config: Any) -> None:
    """Raise a `ConfigError` for the first thing that is wrong; ``config`` is a `MathGRPOConfig` that is being made."""
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        if not (name in ("baseline", "surrogate") and is_own(value)):
            one_of(name, {True: "group", False: "none"}.get(value, value), choices)  # TRL takes both for scale_rewards
    _refuse_values(config)
    for holds, names, why in ignored(config):
        for name in names.split() if holds else ():
            value, default = getattr(config, name), config.__dataclass_fields__[name].default
            if value != default:
                raise ConfigError(name, value, f"would be ignored ({why})", f"leave it at {default!r}")
    _refuse_loss(config)
    _refuse_compile(config)
    if config.reference_refresh_steps:
        _refuse_refresh(config)
    _refuse_vllm(config)
    if is_own(config.baseline):
        try_function(config.baseline, config.num_generations or 2)
    if is_own(config.surrogate):
        try_surrogate(config.surrogate)


def _refuse_values(c: Any) -> None:
    for name in NUMBERS:
        refuse_out_of_range(name, value := getattr(c, name), value, c.__dataclass_fields__[name].default)
    if c.use_adaptive_entropy and c.entropy_coef_min > c.entropy_coef_max:
        reason = f"is above entropy_coef_max={c.entropy_coef_max:g}"
        raise ConfigError("entropy_coef_min", c.entropy_coef_min, reason, "give a smaller number")
    if c.activation_offloading and not c.gradient_checkpointing:
        reason = "without gradient_checkpointing would copy all that every layer saves"
        raise ConfigError("activation_offloading", True, reason, "set gradient_checkpointing to true")
    if c.fp16 and not c.allow_float16:
        reason = "has given NaN with accumulation on GPUs without bfloat16 (T4, V100)"
        raise ConfigError("fp16", True, reason, "use bf16, or neither (float32), or add allow_float16: true")


def _refuse_compile(c: Any) -> None:
    modes = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    backends = tuple(backend.value.lower() for backend in DynamoBackend)
    for name, known in (("torch_compile_backend", backends), ("torch_compile_mode", modes)):
        if value := getattr(c, name):  # which turns torch_compile on
            one_of(name, value, known)
    if c.pack_updates and (c.torch_compile or c.torch_compile_backend or c.torch_compile_mode):
        reason = "compiles anew for every packed row, up to torch's recompile limit, where the run ends"
        raise ConfigError("torch_compile", True, reason, "leave it out, or set pack_updates to false")


def _refuse_loss(c: Any) -> None:
    if c.surrogate != "clip" and c.loss_type not in CLIPPED:
        alike = "grpo" if c.loss_type == "sapo" else "dapo"
        holds = "holds at 1" if c.surrogate == "reinforce" else "does not use"
        reason = f"is a weight of the ratio, which surrogate={c.surrogate!r} {holds}"
        raise ConfigError("loss_type", c.loss_type, reason, f"{alike} reduces tokens in the same way")
    if c.surrogate == "clip" and c.loss_type == "luspo" and c.importance_sampling_level == "token":
        reason = "is defined for the ratio of a sequence, not for importance_sampling_level='token'"
        raise ConfigError("loss_type", "luspo", reason, "set importance_sampling_level to sequence")
    clip = "epsilon" if c.epsilon_high is None else "epsilon_high"
    upper = 1 + getattr(c, clip)
    if c.delta is not None and c.delta <= upper:
        reason = f"caps the ratio below the {upper:g} that {clip}={getattr(c, clip):g} lets through"
        raise ConfigError("delta", c.delta, reason, f"give a number above {upper:g}, or leave it out")
    mode = c.vllm_importance_sampling_mode
    corrects = c.use_vllm and c.vllm_importance_sampling_correction
    if c.loss_type == "vespo" and corrects and not mode.startswith("token_"):
        reason = "needs the ratio of each token between vLLM and the model"
        remedy = f"set vllm_importance_sampling_mode (now {mode!r}) to token_truncate or token_mask"
        raise ConfigError("loss_type", "vespo", reason, remedy)


def _refuse_refresh(c: Any) -> None:
    sharded = c.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if c.beta == 0:
        reason, remedy = "has no reference to refresh (beta=0)", "set beta above 0, or leave this at 0"
    elif c.sync_ref_model:
        reason, remedy = "and sync_ref_model=True would both move the reference", "leave one of the two out"
    elif sharded:
        reason, remedy = "does not work with fsdp", "use DeepSpeed, or leave it at 0"
    else:
        return
    raise ConfigError("reference_refresh_steps", c.reference_refresh_steps, reason, remedy)


def _refuse_vllm(c: Any) -> None:
    urls, several = c.vllm_server_base_url, (c.vllm_server_base_url or "").split(",")
    if c.use_vllm and c.vllm_mode == "server":
        if not urls and not is_address(f"http://{c.vllm_server_host}"):
            raise ConfigError("vllm_server_host", c.vllm_server_host, "is not a host", "give a name or an IP address")
        if len(several) > 1 and c.vllm_sync == "merged":
            reason = "names several servers, and vllm_sync='merged' sends weights to one"
            raise ConfigError("vllm_server_base_url", urls, reason, "name one server")
        if len(set(several)) < len(several):
            raise ConfigError("vllm_server_base_url", urls, "names a server twice", "name each once")
    if c.staleness:
        _refuse_staleness(c)
    for url in several if urls else ():
        if not is_address(url.strip()):
            reason = f"holds {url.strip()!r}, which is not an address"
            raise ConfigError("vllm_server_base_url", urls, reason, "write it as http://127.0.0.1:8000")
    if regex := c.vllm_structured_outputs_regex:
        try:
            re.compile(regex)
        except re.error as error:
            reason = f"is not a regular expression ({error})"
            raise ConfigError("vllm_structured_outputs_regex", regex, reason, "correct the pattern") from None


def _refuse_staleness(c: Any) -> None:
    if not (c.use_vllm and c.vllm_mode == "server"):
        now = f"use_vllm={c.use_vllm}" if not c.use_vllm else f"vllm_mode={c.vllm_mode!r}"
        reason, remedy = f"needs a server that samples on its own ({now})", "set use_vllm: true and vllm_mode: server"
    elif c.vllm_sync != "adapter":
        reason = f"with vllm_sync={c.vllm_sync!r} would change the weights that a batch is being sampled by"
        remedy = "set vllm_sync to adapter"
    elif not c.vllm_importance_sampling_correction:
        reason = "trains on samples of an older policy, and vllm_importance_sampling_correction=False leaves it at that"
        remedy = "set vllm_importance_sampling_correction to true"
    else:
        return
    raise ConfigError("staleness", c.staleness, reason, remedy)


def refuse_unforeseen(staleness: int, asks: Mapping[str, Any]) -> None:
    """The next batch is asked for by its prompts: nothing of ``asks``, by name, may decide what a server is asked."""
    if staleness and (name := next((name for name, value in asks.items() if value), None)):
        reason = f"cannot look ahead where {name} decide what is asked of the server"
        raise ConfigError("staleness", staleness, reason, "leave it at 0")


def refuse_refresh_within_a_rollout(c: Any) -> None:
    """Reference log-probs are computed once a rollout, so a refresh must fall between two of them."""
    rollout = (c.steps_per_generation or 1) * c.num_iterations
    updates = rollout // math.gcd(rollout, c.gradient_accumulation_steps)
    if c.reference_refresh_steps % updates:
        fields = f"num_iterations={c.num_iterations}, steps_per_generation={c.steps_per_generation}"
        reason = f"falls within a rollout, which serves {updates} optimizer steps ({fields})"
        raise ConfigError("reference_refresh_steps", c.reference_refresh_steps, reason, f"use a multiple of {updates}")
