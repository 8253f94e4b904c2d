"""What a `MathGRPOConfig` refuses: values that cannot be, and settings that another one would leave without effect.

Does not check what TRL and transformers refuse by themselves, with the field's name and before weights load.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from accelerate.utils import DynamoBackend

from grpo_math.errors import ConfigError, one_of
from grpo_math.run.redact import is_address
from grpo_math.run.user_functions import is_user_function
from grpo_math.run.weights import launched_with
from grpo_math.trainer.advantages import BASELINES, SCALES, try_function
from grpo_math.trainer.losses import CLIPPED, KL_ESTIMATORS, LOSS_TYPES, SURROGATES, try_surrogate
from grpo_math.trainer.ranges import hard_clamp, refuse_out_of_range

logger = logging.getLogger(__name__)

CHOICES: dict[str, Iterable[str]] = {
    "baseline": BASELINES,
    "scale_rewards": SCALES,
    "surrogate": SURROGATES,
    "kl_estimator": KL_ESTIMATORS,
    # TRL finds these three only once a rollout has been sampled.
    "loss_type": LOSS_TYPES,
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "long_sequences": ("truncate", "mask"),
    "vllm_sync": ("adapter", "merged"),
    # torch looks at these two in the first step.
    "torch_compile_backend": tuple(backend.value.lower() for backend in DynamoBackend),
    "torch_compile_mode": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
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
    ratio = "epsilon epsilon_high delta off_policy_mask_threshold importance_sampling_level"
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
        (
            is_user_function(c.baseline),
            "scale_rewards advantage_eps",
            f"baseline={c.baseline!r} gives the advantages themselves",
        ),
        (not c.max_seq_length_train, "long_sequences", "max_seq_length_train=0 takes every length"),
        (not c.gradient_checkpointing, "gradient_checkpointing_kwargs", "gradient_checkpointing=False"),
        (not c.fp16, "allow_float16", "fp16=False"),
        (not c.pack_updates, "update_token_budget", "pack_updates=False has no budget"),
        *((True, "update_token_budget", f"{name}={value} {whole}") for name, value in moved),
        (c.surrogate == "reinforce", ratio, "surrogate='reinforce' holds the ratio at 1"),
        (
            is_user_function(c.surrogate),
            f"{ratio} top_entropy_quantile",
            f"surrogate={c.surrogate!r} is the whole loss of a token",
        ),
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


Contradiction = tuple[Any, str, str, str]  # whether it holds; the field that is then wrong; why; what to do


def of_update(c: Any) -> list[Contradiction]:
    """Settings of the update that contradict each other."""
    reinforce = c.surrogate == "reinforce"
    ratio = f"surrogate={c.surrogate!r} {'holds at 1' if reinforce else 'does not use'}"
    reducer = "grpo" if c.loss_type == "sapo" else "dapo"
    clip = "epsilon" if c.epsilon_high is None else "epsilon_high"
    upper = 1 + getattr(c, clip)
    corrects, mode = c.vllm_importance_sampling_correction, c.vllm_importance_sampling_mode
    compiles = c.torch_compile or c.torch_compile_backend or c.torch_compile_mode
    return [
        (
            c.use_adaptive_entropy and c.entropy_coef_min > c.entropy_coef_max,
            "entropy_coef_min",
            f"is above entropy_coef_max={c.entropy_coef_max:g}",
            "give a smaller number",
        ),
        (
            c.activation_offloading and not c.gradient_checkpointing,
            "activation_offloading",
            "without gradient_checkpointing would copy all that every layer saves",
            "set gradient_checkpointing to true",
        ),
        (
            c.fp16 and not c.allow_float16,
            "fp16",
            "has given NaN with accumulation on GPUs without bfloat16 (T4, V100)",
            "use bf16, or neither (float32), or add allow_float16: true",
        ),
        (
            c.surrogate != "clip" and c.loss_type not in CLIPPED,
            "loss_type",
            f"is a weight of the ratio, which {ratio}",
            f"{reducer} reduces tokens in the same way",
        ),
        (
            c.surrogate == "clip" and c.loss_type == "luspo" and c.importance_sampling_level == "token",
            "loss_type",
            "is defined for the ratio of a sequence, not for importance_sampling_level='token'",
            "set importance_sampling_level to sequence",
        ),
        (
            c.delta is not None and c.delta <= upper,
            "delta",
            f"caps the ratio below the {upper:g} that {clip}={getattr(c, clip):g} lets through",
            f"give a number above {upper:g}, or leave it out",
        ),
        (
            c.loss_type == "vespo" and c.use_vllm and corrects and not mode.startswith("token_"),
            "loss_type",
            "needs the ratio of each token between vLLM and the model",
            f"set vllm_importance_sampling_mode (now {mode!r}) to token_truncate or token_mask",
        ),
        (
            c.pack_updates and compiles,
            "torch_compile",
            "compiles anew for every packed row, up to torch's recompile limit, where the run ends",
            "leave it out, or set pack_updates to false",
        ),
    ]


def of_generation(c: Any) -> list[Contradiction]:
    """Settings of vLLM and the reference that contradict each other."""
    corrects = c.vllm_importance_sampling_correction
    on_server = c.use_vllm and c.vllm_mode == "server"
    now = f"vllm_mode={c.vllm_mode!r}" if c.use_vllm else f"use_vllm={c.use_vllm}"
    urls = c.vllm_server_base_url.split(",") if c.vllm_server_base_url else []
    wrong_url = next((url.strip() for url in urls if not is_address(url.strip())), None)
    no_host = on_server and not urls and not is_address(f"http://{c.vllm_server_host}")
    refreshes, stale, url = c.reference_refresh_steps, c.staleness, "vllm_server_base_url"
    return [
        (
            refreshes and c.beta == 0,
            "reference_refresh_steps",
            "has no reference to refresh (beta=0)",
            "set beta above 0, or leave this at 0",
        ),
        (
            refreshes and c.sync_ref_model,
            "reference_refresh_steps",
            "and sync_ref_model=True would both move the reference",
            "leave one of the two out",
        ),
        (
            refreshes and (c.fsdp or launched_with("FSDP")),
            "reference_refresh_steps",
            "does not work with fsdp",
            "use DeepSpeed, or leave it at 0",
        ),
        (no_host, "vllm_server_host", "is not a host", "give a name or an IP address"),
        (
            on_server and len(urls) > 1 and c.vllm_sync == "merged",
            url,
            "names several servers, and vllm_sync='merged' sends weights to one",
            "name one server",
        ),
        (on_server and len(set(urls)) < len(urls), url, "names a server twice", "name each once"),
        (wrong_url, url, f"holds {wrong_url!r}, which is not an address", "write it as http://127.0.0.1:8000"),
        (
            stale and not on_server,
            "staleness",
            f"needs a server that samples on its own ({now})",
            "set use_vllm: true and vllm_mode: server",
        ),
        (
            stale and c.vllm_sync != "adapter",
            "staleness",
            f"with vllm_sync={c.vllm_sync!r} would change the weights that a batch is being sampled by",
            "set vllm_sync to adapter",
        ),
        (
            stale and not corrects,
            "staleness",
            "trains on samples of an older policy, and vllm_importance_sampling_correction=False leaves it at that",
            "set vllm_importance_sampling_correction to true",
        ),
    ]


def refuse(config: Any) -> None:
    """Raise a `ConfigError` for the first thing that is wrong; ``config`` is a `MathGRPOConfig` that is being made."""
    default_of = {name: field.default for name, field in config.__dataclass_fields__.items()}
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        if value is not None and not (name in ("baseline", "surrogate") and is_user_function(value)):
            meant = {True: "group", False: "none"}.get(value, value)  # TRL takes both for scale_rewards
            one_of(name, meant, tuple(choices))
    for name in NUMBERS:
        refuse_out_of_range(name, value := getattr(config, name), value, default_of[name])
    for holds, names, why in ignored(config):
        for name in names.split() if holds else ():
            if (value := getattr(config, name)) != default_of[name]:
                raise ConfigError(name, value, f"would be ignored ({why})", f"leave it at {default_of[name]!r}")
    for holds, name, reason, remedy in of_update(config) + of_generation(config):
        if holds:
            raise ConfigError(name, True if name == "torch_compile" else getattr(config, name), reason, remedy)
    if clamp := hard_clamp(vars(config)):
        logger.warning(": ".join(clamp))
    if is_user_function(config.baseline):
        try_function(config.baseline, config.num_generations or 2)
    if is_user_function(config.surrogate):
        try_surrogate(config.surrogate)


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
