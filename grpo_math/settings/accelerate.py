"""An accelerate config, and the DeepSpeed settings of a recipe or of an accelerate config.

Does not import accelerate, which checks the names and values of its settings itself.
"""

from collections.abc import Mapping
from typing import Any

from grpo_math.settings.run_settings import RunSettings
from grpo_math.settings.shipped import accelerate_file, find
from grpo_math.system.reading import read_json, reading
from grpo_math.system.yaml_files import read_yaml

OFFLOAD = ("offload_optimizer", "offload_param")
# The shipped configs, in the order in which they are tried if plain data parallelism does not fit.
ZERO = ("zero2", "zero2_offload", "zero3", "zero3_offload")


def deepspeed_config(value: Any, accelerate: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the DeepSpeed settings of a run: ``value``, the recipe's field, or those of the accelerate config.

    >>> deepspeed_config("deepspeed/zero3.json", None)["zero_optimization"]["stage"]
    3
    >>> deepspeed_config(None, {"distributed_type": "MULTI_GPU"}) is None
    True
    >>> accelerate = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"offload_param_device": "cpu"}}
    >>> zero = deepspeed_config(None, accelerate)["zero_optimization"]
    >>> zero["stage"], zero["offload_optimizer"], zero["offload_param"]
    (2, {'device': 'none'}, {'device': 'cpu'})
    """
    if value is None and accelerate and accelerate.get("distributed_type") == "DEEPSPEED":
        # accelerate takes a DeepSpeed file, or a few settings with these defaults.
        short = accelerate.get("deepspeed_config") or {}
        offload = {part: {"device": short.get(f"{part}_device", "none")} for part in OFFLOAD}
        zero = {"stage": short.get("zero_stage", 2), "reduce_bucket_size": "auto", **offload}
        value = short.get("deepspeed_config_file") or {"zero_optimization": zero}
    if value is None:
        return None
    # Use each value once here, so that a malformed file is one line of error and not a traceback in the plan.
    with reading("deepspeed" if isinstance(value, dict) else value):
        config: dict[str, Any] = value if isinstance(value, dict) else read_json(find(value))
        zero = config.get("zero_optimization", {})
        int(zero.get("stage", 0))
        for part in OFFLOAD:
            zero.get(part, {}).get("device")
        return config


def accelerate_config(name: str) -> dict[str, Any]:
    """Return an accelerate config by its path, or by its name in accelerate_configs/."""
    path = accelerate_file(name)
    with reading(path):
        config = dict(read_yaml(path))
        int(config.get("num_processes", 1))
    return config


def shipped_configs(settings: RunSettings) -> dict[str, Mapping[str, Any] | None]:
    """Return the accelerate configs that `grpo-math train` tries, in order. The first is no config.

    >>> list(shipped_configs(RunSettings({})))
    ['', 'zero2', 'zero2_offload', 'zero3', 'zero3_offload']
    """
    if settings.deepspeed or settings.fsdp or settings.use_cpu:
        return {"": None}
    # checks/training.py rejects settings that need the whole model under ZeRO-3.
    names = [name for name in ZERO if not (settings.needing_whole and name.startswith("zero3"))]
    return {"": None, **{name: accelerate_config(name) for name in names}}
