"""The input of the checks before a run (`Setup`), and an error of a check as a `Finding`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from grpo_math.checks import Finding
from grpo_math.errors import ConfigError, UserError, cut
from grpo_math.planner.model import Shape, model_shape, read_config
from grpo_math.problems.from_recipe import RecipeProblems
from grpo_math.settings.recipe import Recipe


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


@dataclass
class Setup:
    """A run before it starts: its recipe, and what is known about its processes.

    ``tokenizer`` is None until it is loaded. ``started``: the user's launcher, and not `grpo-math train`, starts the
    processes and a vLLM server.
    """

    recipe: Recipe
    processes: int = 1
    accelerate: Mapping[str, Any] = field(default_factory=dict)  # the content of the accelerate config
    tokenizer: Any = None
    started: bool = False

    def __post_init__(self) -> None:
        self.settings = self.recipe.values
        self.problems = RecipeProblems(self.settings)

    def refuse(self, field: str, broken: Any, reason: str, remedy: str) -> None:
        """Raise `ConfigError` for this field if ``broken``."""
        if broken:
            raise ConfigError(field, self.settings[field], reason, remedy)

    @cached_property
    def model_config(self) -> dict[str, Any]:
        return read_config(self.settings["model_name_or_path"], self.settings["model_revision"])

    @cached_property
    def shape(self) -> Shape:
        """Raises `ConfigError` for a model that has not been measured."""
        return model_shape(str(self.settings["model_name_or_path"]), self.model_config, measures=False)
