"""What the checks before a run look at: its settings, and what can be read from them once for all checks.

Does not check anything.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError, UserError
from grpo_math.generation.models import EMBEDDED
from grpo_math.planner.model import Shape, read_config, shape_of
from grpo_math.problems import contamination
from grpo_math.problems.datasets import Row, load_problems

EVAL_N = 128  # problems before and after a run: a difference of 10 points is sure in most
EVAL_LENGTH = 2048  # tokens of a completion, over which so many would take hours
OVERLAP = 0.02  # of the problems to evaluate on may be trained on; one of MATH's is


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
    no_eval: str = "nothing is evaluated"  # why, where eval_n is left to its default

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
        """The problems to evaluate on; none where no evaluation is asked for, or by default where none are held out."""
        s = self.settings
        often = s["heldout_n"] if s["heldout_every"] else 0
        if s["eval_n"] is None and len(self._held_out_by_default) >= often:
            return self._held_out_by_default
        wanted = max(s["eval_n"] or 0, often)
        if not wanted:
            return []
        dataset = s["eval_dataset"] or s["dataset"]
        asks = "eval_n" if s["eval_n"] == wanted else "heldout_n"
        own = {"dataset": "eval_dataset", "columns": "eval_columns"} if s["eval_dataset"] else {}
        with naming({"split": "eval_split", "n": asks, **own}):
            how = {"template": s["template"], "skip_bad_rows": s["skip_bad_rows"]}
            how["columns"] = s[own.get("columns", "columns")]
            rows = load_problems(dataset, s["eval_split"], limit=wanted, **how)
        if len(rows) < (s["eval_n"] or 0):
            reason = f"is more than the {len(rows)} problems of {dataset}, {s['eval_split']}"
            raise ConfigError("eval_n", s["eval_n"], reason, f"use {len(rows)} or less")
        return rows

    @cached_property
    def _held_out_by_default(self) -> list[Row]:
        """At most `EVAL_N` problems that are not trained on; where there are none, ``no_eval`` says why."""
        s = self.settings
        if (s["max_completion_length"] or 0) > EVAL_LENGTH:
            self.no_eval = f"completions may be {s['max_completion_length']} tokens long"
            return []
        dataset, how = s["eval_dataset"] or s["dataset"], {"template": s["template"], "skip_bad_rows": True}
        limit = EVAL_N
        try:
            if dataset.partition(":")[0] == "generated":  # of some levels there are fewer, which asking for is an error
                limit = min(EVAL_N, len(load_problems(dataset, s["eval_split"], **how)))
            rows = load_problems(dataset, s["eval_split"], limit=limit, **how)
        except (UserError, ValueError) as error:
            self.no_eval = str(error)
            return []
        trained = {row["problem"] for row in self.rows}
        equal = sum(row["problem"] in trained for row in rows)
        if s["eval_dataset"] or equal <= OVERLAP * len(rows):
            return rows
        self.no_eval = f"{equal} of {len(rows)} problems that {dataset} has for it are trained on"
        return []

    @property
    def eval_n(self) -> int:
        """How many problems are evaluated before and after training: as asked, or by default."""
        n = self.settings["eval_n"]
        return len(self._held_out_by_default) if n is None else n

    @property
    def about_eval(self) -> str | None:
        """What the default of eval_n comes to, in a line; None where the recipe says it."""
        s = self.settings
        if s["eval_n"] is not None:
            return None
        if not self.eval_n:
            return f"no verdict on the run: {self.no_eval}; eval_dataset names other problems"
        dataset = s["eval_dataset"] or s["dataset"]
        return (
            f"before and after training {self.eval_n} problems of {dataset}, {s['eval_split']}, are evaluated: "
            f"{2 * self.eval_n} completions more (eval_n: 0 leaves it)"
        )

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
