"""What the checks before a run look at: its settings, and what can be read from them once for all checks.

Does not check anything.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError
from grpo_math.generation.models import EMBEDDED
from grpo_math.planner.model import Shape, read_config, shape_of
from grpo_math.problems import contamination
from grpo_math.problems.datasets import Row, load_problems


class Said(NamedTuple):
    """What a check says; preflight.py adds its name."""

    level: str
    message: str
    remedy: str
    evidence: Mapping[str, Any] = MappingProxyType({})


@contextmanager
def naming(fields: Mapping[str, str]) -> Iterator[None]:
    """An argument that is refused inside is named as the recipe names it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(fields.get(error.field, error.field), error.value, error.reason, error.remedy) from None


@dataclass
class Setup:
    """``settings`` has every field, ``given`` names those that the user stated; ``tokenizer`` where it is loaded."""

    settings: Mapping[str, Any]
    given: set[str] = field(default_factory=set)
    processes: int = 1
    accelerate: Mapping[str, Any] | None = None  # the accelerate config, read
    tokenizer: Any = None

    @cached_property
    def rows(self) -> list[Row]:
        """The training problems, or the error that reading them gives."""
        s = self.settings
        with naming({"split": "dataset_split", "n": "dataset_limit"}):
            how = {"template": s["template"], "seed": s["seed"], "skip_bad_rows": s["skip_bad_rows"]}
            how |= {"limit": s["dataset_limit"], "columns": s["columns"]}
            return load_problems(s["dataset"], s["dataset_split"], **how)

    @cached_property
    def held_out(self) -> list[Row]:
        """The problems to evaluate on; none where no evaluation is asked for."""
        s = self.settings
        wanted = max(s["eval_n"], s["heldout_n"] if s["heldout_every"] else 0)
        if not wanted:
            return []
        dataset = s["eval_dataset"] or s["dataset"]
        asks = "eval_n" if s["eval_n"] == wanted else "heldout_n"
        own = {"dataset": "eval_dataset", "columns": "eval_columns"} if s["eval_dataset"] else {}
        with naming({"split": "eval_split", "n": asks, **own}):
            how = {"template": s["template"], "skip_bad_rows": s["skip_bad_rows"]}
            how["columns"] = s[own.get("columns", "columns")]
            rows = load_problems(dataset, s["eval_split"], limit=wanted, **how)
        if len(rows) < s["eval_n"]:
            reason = f"is more than the {len(rows)} problems of {dataset}, {s['eval_split']}"
            raise ConfigError("eval_n", s["eval_n"], reason, f"use {len(rows)} or less")
        return rows

    @cached_property
    def overlap(self) -> dict[str, Any] | None:
        """Which of the problems to evaluate on overlap with those to train on."""
        return contamination.overlap(self.held_out, self.rows) if self.held_out else None

    @cached_property
    def model_config(self) -> dict[str, Any]:
        return read_config(self.settings["model_name_or_path"], self.settings["model_revision"])

    @cached_property
    def shape(self) -> Shape:
        """Raises `ConfigError` for a family that the planner does not know."""
        return shape_of(str(self.settings["model_name_or_path"]), self.model_config)

    @property
    def embedded(self) -> bool:
        return self.settings["model_name_or_path"] == EMBEDDED

    def sample(self, most: int) -> list[Row]:
        """At most so many training problems, evenly over the data."""
        return self.rows[:: -(-len(self.rows) // most)]
