"""A recipe -> the settings that affect memory, with the same defaults as in training.

Does not check fields that do not affect memory (training checks them), and decides nothing.
"""

from collections.abc import Mapping
from typing import Any

from grpo_math.errors import ConfigError, one_of
from grpo_math.settings.fields import fields

Settings = Mapping[str, Any]  # of a recipe, of an accelerate config or of DeepSpeed, by name

DEFAULTS: dict[str, Any] = {name: field.default for name, field in fields().items()}


class NotPlanned(ConfigError):
    """A setting or model that the plan does not support. Training may support it."""


OPTIMIZERS = (
    *("adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "adamw_8bit"),
    *("paged_adamw_8bit", "paged_adamw_32bit", "sgd"),
)
DTYPES = ("auto", "bfloat16", "float16", "float32")


def resolve(recipe: Settings) -> dict[str, Any]:
    """Return the recipe's fields with defaults. Raises `NotPlanned` for values that the plan does not support.

    settings/recipe.py has already checked each field.

    >>> resolve({"model_name_or_path": "embedded"})["per_device_train_batch_size"]
    8
    >>> resolve({"optim": "adamw"})
    Traceback (most recent call last):
    ...
    grpo_math.planner.settings.NotPlanned: optim='adamw' is not known to the plan: use one of adamw_torch, \
adamw_torch_fused, adamw_bnb_8bit, adamw_8bit, paged_adamw_8bit, paged_adamw_32bit, sgd
    """
    settings = {**DEFAULTS, **recipe}
    init = settings["model_init_kwargs"] or {}
    for name in ("dtype", "attn_implementation"):
        if isinstance(init, Mapping) and init.get(name):
            settings[name] = init[name]
    kernel = settings["attn_implementation"]
    if kernel not in (None, "sdpa") and "flash" not in str(kernel):
        raise NotPlanned("attn_implementation", kernel, "is not known to the plan", "use sdpa or flash_attention_2")
    one_of("dtype", settings["dtype"], DTYPES)
    if settings["optim"] not in OPTIMIZERS:
        raise NotPlanned("optim", settings["optim"], "is not known to the plan", f"use one of {', '.join(OPTIMIZERS)}")
    for name in ("fsdp", "bnb_4bit_quant_storage", "pack_updates"):
        if settings[name] != DEFAULTS[name] and settings[name] is not None:
            raise NotPlanned(name, settings[name], "is not known to the plan", "leave it out to plan the rest")
    quantised = next((name for name in ("load_in_4bit", "load_in_8bit") if settings[name]), None)
    if quantised and not settings["use_peft"]:
        raise ConfigError(quantised, True, "cannot be trained without an adapter", "set use_peft to true")
    return settings


class Zero:
    """DeepSpeed's settings that affect memory: stage 0 (no DeepSpeed) to 3, offloading, the size of a bucket.

    ``auto`` for the bucket is hidden x hidden, as in transformers. DeepSpeed's default is 5e8 elements.
    """

    def __init__(self, config: Settings | None, hidden: int) -> None:
        zero = dict((config or {}).get("zero_optimization") or {})
        self.active = config is not None
        self.stage = int(zero.get("stage", 0))
        if self.active and self.stage not in (1, 2, 3):
            reason = "in DeepSpeed's settings is not known to the plan"
            raise NotPlanned("stage", self.stage, reason, "use ZeRO 1, 2 or 3, or no DeepSpeed")

        def device(name: str) -> bool:
            return (zero.get(name) or {}).get("device", "none") in ("cpu", "nvme")

        self.offloads_optimizer, self.offloads_parameters = device("offload_optimizer"), device("offload_param")
        bucket = zero.get("reduce_bucket_size", 500_000_000)
        self.bucket = hidden * hidden if bucket == "auto" else int(float(bucket))
        self.overlaps = zero.get("overlap_comm", self.stage == 3) in (True, "auto")
