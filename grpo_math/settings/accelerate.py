"""Checks of what starts the processes: an accelerate config, and the variables that a launcher sets.

>>> accelerate_config("zero.yaml", {"distributed_type": "NO", "num_processes": 0})
Traceback (most recent call last):
...
grpo_math.errors.ConfigError: num_processes=0 in zero.yaml is out of range: give a whole number of 1 or more

Does not import accelerate: what it knows is read out of its source.
"""

import ast
import functools
import importlib.util
import os
import re
from collections.abc import Mapping
from typing import Any

from grpo_math.errors import ConfigError, cut, one_of
from grpo_math.reading import Unreadable, read_json
from grpo_math.run.history import number
from grpo_math.settings.fields import classes_of
from grpo_math.settings.shipped import find


def deepspeed_config(settings: Mapping[str, Any], accelerate: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The DeepSpeed settings that will hold: the recipe's field ``deepspeed``, or the accelerate config's."""
    name, value = "deepspeed", settings["deepspeed"]
    if value is None and accelerate and accelerate.get("distributed_type") == "DEEPSPEED":
        own = accelerate.get("deepspeed_config") or {}
        if not (value := own.get("deepspeed_config_file")):
            off = {part: {"device": own.get(f"{part}_device", "none")} for part in OFFLOAD}
            return {"zero_optimization": {"stage": own.get("zero_stage", 2), "reduce_bucket_size": "auto", **off}}
        name = "deepspeed_config_file"
    if isinstance(value, dict):
        _check_zero(name, "{...}", value)
    if value is None or isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise ConfigError(name, value, "is no path", "give the path of a DeepSpeed JSON file")
    try:
        read = read_json(find(value))
    except Unreadable as error:
        raise ConfigError(name, value, str(error), "give the path of a DeepSpeed JSON file") from None
    if not isinstance(read, dict):
        raise ConfigError(name, value, "is not a JSON object", "give the path of a DeepSpeed JSON file")
    _check_zero(name, value, read)
    return read


def _check_zero(name: str, value: object, config: Mapping[str, Any]) -> None:
    """What the plan reads of DeepSpeed's settings is of the kind that it should be."""
    zero = config.get("zero_optimization")
    parts = zero if isinstance(zero, dict) else {}
    stage, bucket = parts.get("stage", 0), parts.get("reduce_bucket_size", "auto")
    for part, said, good, remedy in (
        ("zero_optimization", zero, zero is None or isinstance(zero, dict), "write its fields in {}"),
        ("stage", stage, type(stage) is int and 0 <= stage <= 3, "give 1, 2 or 3"),
        ("reduce_bucket_size", bucket, bucket == "auto" or number(bucket), "give a number, or auto"),
        *((x, parts.get(x), isinstance(parts.get(x), dict | None), 'write {"device": "cpu"}') for x in OFFLOAD),
    ):
        if not good:
            raise ConfigError(part, said, f"in {name}={cut(value)} cannot be", remedy)


OFFLOAD = ("offload_optimizer", "offload_param")
NUMBERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "GRPO_MATH_GRADE_MEMORY")
TRUTH = ("1", "0", "true", "false", "yes", "no", "on", "off", "y", "n", "t", "f", "")
SWITCHES = ("ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")
PRECISIONS = ("no", "fp16", "bf16")
LAUNCH = "unset it, or start with accelerate launch"
DEVICE = re.compile(r"-?\d+|(GPU|MIG)-[\w/-]+")


def whole_numbers() -> None:
    """Raise `ConfigError` for a variable of `NUMBERS` that is none."""
    for name in NUMBERS:
        wanted = r"-1|[0-9]{1,18}" if name.endswith("RANK") else "[0-9]{1,18}"  # transformers takes -1 for no launcher
        if not re.fullmatch(wanted, said := os.environ.get(name, "0")):
            raise ConfigError(name, said, "is not a whole number", "unset it, or give a number")


@functools.cache
def _names(file: str, *classes: str) -> tuple[str, ...]:
    """The names that these classes of accelerate give a type or a value."""
    lines = [line for node in classes_of("accelerate", file, classes) for line in node.body]
    typed = [ast.unparse(line.target) for line in lines if isinstance(line, ast.AnnAssign)]
    return (*typed, *(ast.unparse(line.targets[0]) for line in lines if isinstance(line, ast.Assign)))


def accelerate_config(name: str, says: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a file that `accelerate launch` would refuse."""

    def refuse(field: str, reason: str, remedy: str) -> ConfigError:
        return ConfigError(field, says.get(field), f"in {name} {reason}", remedy)

    known = (*_names("commands/config/config_args.py", "BaseConfig", "ClusterConfig"), "command_file", "commands")
    for field in says:
        if field not in known:
            raise refuse(field, "is not a setting of accelerate", "take it out, or run accelerate config")
    kinds = _names("utils/dataclasses.py", "DistributedType")
    if says.get("distributed_type") not in (*kinds, False):  # YAML reads an unquoted NO as false
        raise refuse("distributed_type", "is not a way to distribute", f"give one of {', '.join(kinds)}")
    for field, least in (("num_processes", 1), ("num_machines", 1), ("main_process_port", 0)):
        value = says.get(field)
        if value is not None and (type(value) is not int or not least <= value <= 65535):
            raise refuse(field, "is out of range", f"give a whole number of {least} or more")
    if str(says.get("mixed_precision", "no")).lower() not in (*PRECISIONS, "false"):
        raise refuse("mixed_precision", "is not known", f"give one of {', '.join(PRECISIONS)}")
    own = says.get("deepspeed_config")
    if own is not None and not isinstance(own, dict):
        raise refuse("deepspeed_config", "is not a mapping", "write its fields under it")
    if says["distributed_type"] == "DEEPSPEED":
        if str(stage := (own or {}).get("zero_stage", 2)) not in ("0", "1", "2", "3"):
            raise ConfigError("zero_stage", stage, f"in {name} is not a stage of ZeRO", "give 1, 2 or 3")
        deepspeed_config({"deepspeed": None}, says)


def environment() -> None:
    """Raise `ConfigError` for a variable that cannot be, before torch or accelerate trips over it."""
    said = os.environ
    whole_numbers()
    processes = int(said.get("WORLD_SIZE", "1"))
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if processes > 1 and name not in said:
            raise ConfigError("WORLD_SIZE", processes, f"is set, and {name} is not", LAUNCH)
    if int(said.get("RANK", "0")) >= max(processes, 1):
        remedy = "unset both, or start with accelerate launch"
        raise ConfigError("RANK", int(said["RANK"]), f"is not below WORLD_SIZE={processes}", remedy)
    if "LOCAL_RANK" in said and int(said["LOCAL_RANK"]) >= 0 and "MASTER_ADDR" not in said:
        raise ConfigError("LOCAL_RANK", int(said["LOCAL_RANK"]), "is set, and MASTER_ADDR is not", LAUNCH)
    for name in SWITCHES:
        if said.get(name, "").lower() not in TRUTH:
            raise ConfigError(name, said[name], "is neither true nor false", "use one of the two, or unset it")
    asked = said.get("ACCELERATE_USE_DEEPSPEED", "")
    if asked.lower() in ("1", "true", "yes") and "RANK" not in said and not importlib.util.find_spec("mpi4py"):
        raise ConfigError("ACCELERATE_USE_DEEPSPEED", asked, "needs processes that a launcher has started", LAUNCH)
    one_of("ACCELERATE_MIXED_PRECISION", said.get("ACCELERATE_MIXED_PRECISION", "no").lower(), PRECISIONS)
    backends = tuple(name.lower() for name in _names("utils/dataclasses.py", "DynamoBackend"))
    one_of("ACCELERATE_DYNAMO_BACKEND", said.get("ACCELERATE_DYNAMO_BACKEND", "no").lower(), backends)
    devices = said.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    if devices and not all(DEVICE.fullmatch(device) for device in devices.rstrip(",").split(",")):
        raise ConfigError("CUDA_VISIBLE_DEVICES", devices, "names no GPU", "give numbers, such as 0,1")
