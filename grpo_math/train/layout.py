"""The layout of a run on this machine: the GPUs of training and of the vLLM server, and the accelerate config.

launcher.py and serve.py start the processes.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math import planner
from grpo_math.errors import ConfigError, UserError
from grpo_math.planner.devices import Layout
from grpo_math.planner.settings import NotPlanned
from grpo_math.settings import accelerate
from grpo_math.settings.run_settings import RunSettings
from grpo_math.settings.shipped import accelerate_file
from grpo_math.system.gpus import Gpu, first_gpus
from grpo_math.system.machine import SLEEPING_THREADS, versions
from grpo_math.system.streams import say

INHERITED = "GRPO_MATH_HANDED_ON"  # variable of the training processes: what launcher.py hands on to their `main`


def assigned_gpus(settings: RunSettings, count: int | None) -> list[Gpu]:
    """Return the first ``count`` GPUs of this machine, or all; none if the recipe is for the CPU."""
    if settings.use_cpu:
        if count:
            raise ConfigError("gpus", count, "contradicts use_cpu=True", "leave one of them out")
        return []
    return first_gpus(count)


def refuse_used(gpus: Sequence[Gpu]) -> None:
    """Raise `UserError` for a GPU that another program fills. Warn about programs that take as little as a desktop."""
    for gpu in gpus:
        if gpu.shared_with:
            say("warning:", f"GPU {gpu.number} is also used by {gpu.shared_with}")
        if gpu.used_by:
            remedy = "end that, or name other GPUs in CUDA_VISIBLE_DEVICES"
            raise UserError(f"GPU {gpu.number} is in use by {gpu.used_by}: {remedy}")


class Config(NamedTuple):
    """An accelerate config: its path and its content."""

    path: Path
    content: dict[str, Any]


def _config(name: str) -> Config:
    """Read a config by its path, or by its name in accelerate_configs/."""
    path, content = accelerate_file(name), accelerate.accelerate_config(name)
    if content.get("distributed_type") == "DEEPSPEED" and "deepspeed" not in versions():
        remedy = "install it with this package's extra deepspeed, or leave accelerate_config out"
        raise ConfigError("accelerate_config", name, "needs DeepSpeed, which is not installed", remedy)
    if int(content.get("num_machines") or 1) > 1:
        reason = "is for several machines, and grpo-math train starts the processes of one"
        raise ConfigError("accelerate_config", name, reason, "run accelerate launch on each of them")
    # accelerate would replace CUDA_VISIBLE_DEVICES, which has the layout.
    if content.get("gpu_ids") not in (None, "all"):
        raise ConfigError("accelerate_config", name, "sets gpu_ids", "leave them out, and set CUDA_VISIBLE_DEVICES")
    return Config(path, content)


def choose_layout(settings: RunSettings, gpus: Sequence[Gpu], requested: str | None) -> tuple[Layout, Config | None]:
    """Return the layout and its accelerate config (None: a single process without one). Print both, and why."""
    config = _config(requested) if requested is not None else None
    if not gpus:
        processes = int(config.content.get("num_processes") or 1) if config else 1
        return Layout("server" if settings.starts_server else "transformers", processes, 0, 1, "on the CPU"), config
    # accelerate starts one process then, with any --num_processes.
    if config and config.content.get("distributed_type") == "NO" and not settings.starts_server:
        gpus = gpus[:1]
    layout, config, problems = _planned(settings, gpus, config)
    if config is None and layout.policy > 1:
        config = _config("multi_gpu")
    say("layout", f"{roles(layout, gpus)} ({layout.why})")
    if config is not None:
        say("config", f"{config.path.stem}, {layout.policy} process{'es' if layout.policy > 1 else ''}")
    for problem in problems:
        say("plan", f"may not fit: {problem}; grpo-math plan says what to change")
    return layout, config


def _planned(
    settings: RunSettings, gpus: Sequence[Gpu], requested: Config | None
) -> tuple[Layout, Config | None, Sequence[str]]:
    """Return the layout, the accelerate config that was requested or is the first that fits, and what may not fit."""
    configs: dict[str, Config | None] = {"": requested}
    if requested is None and "deepspeed" in versions():
        configs |= {name: _config(name) for name in accelerate.shipped_configs(settings) if name}
    contents = {name: config.content if config else None for name, config in configs.items()}
    try:
        # The plan counts all GPUs alike, so the smallest one decides.
        name, plan = planner.choose(settings, contents, gpus=len(gpus), gpu_gb=min(gpu.gb for gpu in gpus))
    except NotPlanned as error:
        say("plan", str(error))
        layout = planner.unplanned_layout(settings, len(gpus))
        return layout._replace(why="the plan cannot compute this recipe's memory"), requested, []
    return plan.layout, configs[name], plan.problems


def roles(layout: Layout, gpus: Sequence[Gpu]) -> str:
    contents = ((", ".join(str(gpus[i].number) for i in role["gpus"]), role["role"]) for role in layout.roles())
    return "; ".join(f"GPU {numbers}: {role}" for numbers, role in contents)


def environment(gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the variables of a process that sees only these GPUs, or of one that computes on the CPU."""
    if not gpus:
        name, value = SLEEPING_THREADS
        # The user's own value wins.
        return {name: value, **os.environ}
    # CUDA numbers the fastest GPU first by default. The layout has nvidia-smi's numbers.
    numbers = ",".join(gpu.device for gpu in gpus)
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ, "CUDA_VISIBLE_DEVICES": numbers}
