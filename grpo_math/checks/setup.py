"""What the checks before a run look at, and the form in which they say what they find.

A check is a function of a `Setup` that yields what it `Said`. Rules that need nothing but settings are rows of a list:
the first column says whether a rule is broken.

>>> refuse({"beta": -1}, [(True, "beta", "is negative", "give 0 or more")])
Traceback (most recent call last):
...
grpo_math.errors.ConfigError: beta=-1 is negative: give 0 or more

Does not check anything.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError
from grpo_math.planner.model import Shape, read_config, shape_of
from grpo_math.problems.of_recipe import RecipeProblems


class Said(NamedTuple):
    """What a check says; preflight.py adds the name of the check."""

    level: str
    message: str
    remedy: str = ""


def refuse(settings: Mapping[str, Any], rules: Iterable[tuple[Any, str, str, str]]) -> None:
    """Raise `ConfigError` for the first broken rule of rows (broken, field, reason, remedy)."""
    for broken, name, reason, remedy in rules:
        if broken:
            raise ConfigError(name, settings[name], reason, remedy)


def warnings(rules: Iterable[tuple[Any, str, str]]) -> Iterator[Said]:
    """Yield a warning for each broken rule of rows (broken, message, remedy)."""
    yield from (Said("warning", message, remedy) for broken, message, remedy in rules if broken)


@dataclass
class Setup:
    """``settings`` has every field, ``given`` names those that the user stated; ``tokenizer`` if it is loaded."""

    settings: Mapping[str, Any]
    given: set[str] = field(default_factory=set)
    processes: int = 1
    accelerate: Mapping[str, Any] | None = None  # the accelerate config, read
    tokenizer: Any = None

    def __post_init__(self) -> None:
        self.problems = RecipeProblems(self.settings)

    @cached_property
    def model_config(self) -> dict[str, Any]:
        return read_config(self.settings["model_name_or_path"], self.settings["model_revision"])

    @cached_property
    def shape(self) -> Shape:
        """Raises `ConfigError` for a model that has not been measured."""
        return shape_of(str(self.settings["model_name_or_path"]), self.model_config, measures=False)
