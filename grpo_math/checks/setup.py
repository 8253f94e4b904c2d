"""The input of the checks before a run (`Setup`), and their output (`CheckResult`).

A check is a function of a `Setup` that yields a `CheckResult` for each finding, or raises the `UserError` that training
would end with.

Does not check anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError, UserError, cut
from grpo_math.planner.model import Shape, read_config, shape_of
from grpo_math.problems.of_recipe import RecipeProblems


class CheckResult(NamedTuple):
    """A finding without the name of the check, which preflight.py adds."""

    level: str
    message: str
    remedy: str = ""


def result_of(error: UserError, level: str = "error") -> CheckResult:
    """Return an error as a `CheckResult`. The text after the last colon is the remedy.

    >>> result_of(ConfigError("beta", -1, "is negative", "give 0 or more"))
    CheckResult(level='error', message='beta=-1 is negative', remedy='give 0 or more')
    """
    if isinstance(error, ConfigError):
        return CheckResult(level, f"{error.field}={cut(error.value)} {error.reason}", error.remedy)
    message, _, remedy = " ".join(str(error).split()).rpartition(": ")
    return CheckResult(level, message or remedy, remedy if message else "correct it")


@dataclass
class Setup:
    """A run before it starts. ``settings`` has every field; ``given`` names the fields that the user stated.

    ``tokenizer`` is None until it is loaded.
    """

    settings: Mapping[str, Any]
    given: set[str] = field(default_factory=set)
    processes: int = 1
    accelerate: Mapping[str, Any] | None = None  # the content of the accelerate config
    tokenizer: Any = None

    def __post_init__(self) -> None:
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
        return shape_of(str(self.settings["model_name_or_path"]), self.model_config, measures=False)
