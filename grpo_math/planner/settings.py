"""The settings that the plan supports, and those of DeepSpeed.

Training checks the other fields.
"""

from collections.abc import Mapping
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.generation.dtypes import has_bfloat16, number_formats
from grpo_math.settings.fields import defaults
from grpo_math.settings.run_settings import RunSettings

LaunchSettings = Mapping[str, Any]  # of an accelerate config or of DeepSpeed, by name
Json = dict[str, Any]


class NotPlanned(ConfigError):
    """A setting or model that the plan does not support. Training may support it."""


OPTIMIZERS = (
    *("adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "adamw_8bit"),
    *("paged_adamw_8bit", "paged_adamw_32bit", "sgd"),
)
UNKNOWN = ("fsdp", "bnb_4bit_quant_storage", "load_in_8bit", "pack_updates")


def resolve(settings: RunSettings, capability: float | None = None) -> RunSettings:
    """Return the settings with the number formats of a GPU. Raises `NotPlanned` for values that the plan does not
    support.

    ``capability``: the compute capability of the GPU, if known.

    settings/recipe.py has already checked each field.

    >>> resolve(RunSettings({"dtype": "auto", "use_peft": True}), capability=7.5).dtype
    'float16'
    >>> resolve(RunSettings({"optim": "adamw"}))
    Traceback (most recent call last):
    ...
    grpo_math.planner.settings.NotPlanned: optim='adamw' is not known to the plan: use one of adamw_torch, \
adamw_torch_fused, adamw_bnb_8bit, adamw_8bit, paged_adamw_8bit, paged_adamw_32bit, sgd
    """
    if not has_bfloat16(capability):
        settings = settings.derived(**number_formats(settings, "float16")._asdict())
    kernel, in_4bit = settings.attn_implementation or "sdpa", settings.load_in_4bit
    optimizers = f"use one of {', '.join(OPTIMIZERS)}"
    refusals = {
        "attn_implementation": (kernel == "sdpa" or "flash" in str(kernel), "use sdpa or flash_attention_2"),
        "optim": (settings.optim in OPTIMIZERS, optimizers),
        "load_in_4bit": (settings.use_peft or not in_4bit, "set use_peft to true"),
        **{
            name: (getattr(settings, name) in (None, defaults()[name]), "leave it out to plan the rest")
            for name in UNKNOWN
        },
    }
    for name, (known, remedy) in refusals.items():
        if not known:
            raise NotPlanned(name, getattr(settings, name), "is not known to the plan", remedy)
    return settings


class Zero:
    """DeepSpeed's settings that affect memory: stage 0 (no DeepSpeed) to 3, offloading, the size of a bucket.

    ``auto`` for the bucket is hidden x hidden, as in transformers. DeepSpeed's default is 5e8 elements.
    """

    def __init__(self, config: LaunchSettings | None, hidden: int) -> None:
        zero = (config or {}).get("zero_optimization") or {}
        self.active = config is not None
        self.stage = int(zero.get("stage", 0))
        if self.active and self.stage not in (1, 2, 3):
            reason = "in DeepSpeed's settings is not known to the plan"
            raise NotPlanned("stage", self.stage, reason, "use ZeRO 1, 2 or 3, or no DeepSpeed")
        self.offloads_optimizer, self.offloads_parameters = (
            (zero.get(name) or {}).get("device", "none") != "none" for name in ("offload_optimizer", "offload_param")
        )
        # accelerate replaces the optimizer by DeepSpeedCPUAdam, in float32.
        self.replaces_optimizer = self.offloads_optimizer and (config or {}).get("zero_force_ds_cpu_optimizer", True)
        bucket = zero.get("reduce_bucket_size", 500_000_000)
        self.bucket = hidden * hidden if bucket == "auto" else int(float(bucket))
        self.overlaps = zero.get("overlap_comm", self.stage == 3) in (True, "auto")
