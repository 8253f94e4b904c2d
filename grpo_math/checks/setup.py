"""The input of the checks before a run (`Setup`), and an error of a check as a `Finding`."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from grpo_math import planner
from grpo_math.errors import ConfigError, Finding, UserError, cut
from grpo_math.generation.models import load_tokenizer, model_path
from grpo_math.planner.memory_plan import MemoryPlan
from grpo_math.planner.model import Shape, model_shape, read_config
from grpo_math.problems.from_recipe import RecipeProblems
from grpo_math.settings.accelerate import shipped_configs
from grpo_math.settings.recipe import Recipe
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.gpus import count_and_gb
from grpo_math.system.machine import launched_with, versions

WITH_COPY = ("DEEPSPEED", "FSDP")  # of accelerate's distributed types


def as_finding(error: UserError, check: str, level: str = "error") -> Finding:
    """Return an error as a finding. The text after the last colon is the remedy.

    >>> as_finding(ConfigError("beta", -1, "is negative", "give 0 or more"), "settings").line()
    'error: beta=-1 is negative. Remedy: give 0 or more (settings)'
    >>> as_finding(UserError("no such thing"), "model")
    Finding(level='error', message='no such thing', remedy='correct it', check='model')
    """
    # Not from the text: the remedy of a setting may contain a colon.
    if isinstance(error, ConfigError):
        return Finding(level, f"{error.field}={cut(error.value)} {error.reason}", error.remedy, check)
    message, _, remedy = " ".join(str(error).split()).rpartition(": ")
    return Finding(level, message or remedy, remedy if message else "correct it", check)


@dataclass(frozen=True)
class Setup:
    """A run before it starts: its recipe, and how it is launched. The properties are computed when a check needs them.

    ``launched``: the processes of the launcher or of the accelerate config. ``started``: the user's launcher, and not
    `grpo-math train`, starts the processes and a vLLM server.
    """

    recipe: Recipe
    launched: int = 1
    accelerate: Mapping[str, Any] = field(default_factory=dict)  # the content of the accelerate config
    started: bool = False

    @property
    def settings(self) -> RunSettings:
        return self.recipe.settings

    @cached_property
    def problems(self) -> RecipeProblems:
        return RecipeProblems(self.settings)

    @property
    def on_cpu(self) -> bool:
        """True if the recipe or accelerate's config asks for the CPU."""
        by_launcher = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
        return self.settings.use_cpu or bool(self.accelerate.get("use_cpu")) or by_launcher

    @cached_property
    def gpus(self) -> tuple[int, float]:
        """The number of GPUs that `grpo-math train` shares out, and the memory of one in GB."""
        return (0, 0.0) if self.settings.use_cpu or self.started else count_and_gb()

    @cached_property
    def memory_plan(self) -> tuple[Mapping[str, Any], MemoryPlan] | None:
        """The accelerate config that `grpo-math train` chooses for its GPUs, and the plan; None without GPUs or a plan.

        `layout` reports a layout that is impossible. The GPUs of a server that the user starts may be hidden.
        """
        gpus, gpu_gb = self.gpus
        with suppress(UserError):
            if gpus:
                name, plan = planner.choose(self.settings, self.configs, gpus=gpus, gpu_gb=gpu_gb, offline=True)
                return self.configs[name] or {}, plan
        return None

    @cached_property
    def processes(self) -> int:
        """The processes that train. `grpo-math train` starts one on each GPU of the policy.

        An accelerate config gives the number of processes only for a CPU and for several machines.
        """
        if self.memory_plan:
            return self.memory_plan[1].layout.policy
        with suppress(UserError):
            if self.gpus[0]:
                return planner.unplanned_layout(self.settings, self.gpus[0]).policy
        return self.launched

    @property
    def accelerate_config(self) -> Mapping[str, Any]:
        """The accelerate config of the run, or the one that `grpo-math train` chooses; {} without one."""
        return self.accelerate or (self.memory_plan[0] if self.memory_plan else {})

    @property
    def has_copy(self) -> bool:
        """True if DeepSpeed or FSDP trains a float32 copy of 16-bit weights."""
        s = self.settings
        by_config = self.accelerate_config.get("distributed_type") in WITH_COPY
        return bool(s.deepspeed or s.fsdp or by_config or any(map(launched_with, WITH_COPY)))

    @cached_property
    def configs(self) -> dict[str, Mapping[str, Any] | None]:
        """The accelerate config of the run, or those of which `grpo-math train` takes the first that fits."""
        of_run = {"": {"num_processes": self.launched, **self.accelerate}}
        is_chosen = self.accelerate or self.started or "deepspeed" not in versions()
        return {**of_run} if is_chosen else {**shipped_configs(self.settings), **of_run}

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer. Loading imports torch."""
        return load_tokenizer(model_path(self.settings.model_name_or_path), self.settings.model_revision)

    def refuse(self, field: str, broken: Any, reason: str, remedy: str) -> None:
        """Raise `ConfigError` for this field if ``broken``."""
        if broken:
            raise ConfigError(field, getattr(self.settings, field), reason, remedy)

    @cached_property
    def model_config(self) -> dict[str, Any]:
        return read_config(self.settings.model_name_or_path, self.settings.model_revision)

    @cached_property
    def shape(self) -> Shape:
        """Raises `ConfigError` for a model that has not been measured."""
        return model_shape(str(self.settings.model_name_or_path), self.model_config, measures=False)
