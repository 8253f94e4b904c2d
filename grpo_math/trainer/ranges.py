"""The range of each number of a recipe, ours and TRL's: checked in a recipe and in a `MathGRPOConfig` of a script.

>>> refuse_out_of_range("temperature", 0, "0", 1.0)
Traceback (most recent call last):
...
grpo_math.errors.ConfigError: temperature='0' is out of range: give a number above 0

Does not import torch, and does not check what two settings mean together.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from grpo_math.errors import ConfigError

Rule = tuple[Callable[[float], bool], str]
RULES: dict[Rule, str] = {
    (lambda x: x > 0, "a number above 0"): (
        "temperature repetition_penalty adam_epsilon num_train_epochs vllm_server_timeout delta advantage_eps "
        "grade_timeout neftune_noise_alpha sapo_temperature_pos sapo_temperature_neg vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_cap epsilon epsilon_high"
    ),
    (lambda x: (x >= 1 and x == int(x)) or 0 < x < 1, "a whole number, or a share of the run below 1"): (
        "save_steps logging_steps eval_steps"
    ),
    (lambda x: x >= 1, "1 or more"): (
        "max_completion_length lora_r lora_alpha num_iterations heldout_n dataset_limit max_nonfinite_steps "
        "vllm_tensor_parallel_size vllm_max_model_length save_total_limit difficulty_samples ddp_timeout "
        "per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size "
        "ref_model_sync_steps pad_to_multiple_of torch_empty_cache_steps dataloader_prefetch_factor ddp_bucket_cap_mb"
    ),
    (lambda x: x >= 2, "2 or more, since a completion is compared with the others of its group"): "num_generations",
    (lambda x: x >= 0, "0 or more"): (
        "beta weight_decay max_grad_norm warmup_steps eval_n heldout_every prompts_per_step "
        "resample_groups update_token_budget reference_refresh_steps max_seq_length_train watchdog_minutes "
        "entropy_coef entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target router_aux_loss_coef "
        "off_policy_mask_threshold num_completions_to_print vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg "
        "vllm_importance_sampling_clip_min"
    ),
    (lambda x: 0 < x <= 1, "a number above 0, and 1 at most"): "learning_rate top_p vllm_gpu_memory_utilization",
    (lambda x: 0 <= x <= 1, "a number from 0 to 1"): "top_entropy_quantile ref_model_mixup_alpha",
    (lambda x: x == 0 or x >= 2, "2 or more, or 0 for all tokens: with 1 a group's completions are alike"): "top_k",
    (lambda x: 0 <= x < 1, "a number from 0, and below 1: with 1 a group's completions are alike"): "min_p",
    (lambda x: 0 <= x <= 1024, "a number from 0 to 1024"): "dataloader_num_workers",
    (lambda x: 0 <= x < 1, "a number from 0, and below 1"): "lora_dropout adam_beta1 adam_beta2",
    (lambda x: x >= 1 or x == -1, "1 or more, or -1 for num_train_epochs to decide"): "max_steps",
    (lambda x: 0 <= x < 2**32, "a whole number from 0, and below 2^32"): "seed data_seed",
    (lambda x: x in (0, 1), "0 or 1"): "staleness",
    (lambda x: 1 <= x <= 65535, "a number from 1 to 65535"): "vllm_server_port vllm_group_port",
}
RANGES: dict[str, Rule] = {name: rule for rule, names in RULES.items() for name in names.split()}


def refuse_out_of_range(name: str, number: float, said: Any, default: Any) -> None:
    """Raise a `ConfigError` for a number that is not finite or not in the range of its field. ``said``: as it was
    written."""
    if not math.isfinite(number):
        raise ConfigError(name, said, "is not finite", f"the default is {default!r}")
    if name in RANGES and not RANGES[name][0](number):
        raise ConfigError(name, said, "is out of range", f"give {RANGES[name][1]}")


def hard_clamp(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what is wrong and a remedy if CISPO's bound of the ratio itself is left at a default for 1 + epsilon.

    >>> hard_clamp({"loss_type": "cispo", "epsilon_high": 5.0, "surrogate": "clip"})
    """
    if (settings["loss_type"], settings["epsilon_high"], settings["surrogate"]) != ("cispo", None, "clip"):
        return None
    return f"loss_type='cispo' without epsilon_high clamps the ratio at {settings['epsilon']}", "set epsilon_high: 5.0"
