"""The problems that a recipe names: those to train on, and those to evaluate on.

Does not evaluate, and checks no gold answer.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from grpo_math.errors import ConfigError, UserError
from grpo_math.problems import contamination
from grpo_math.problems.datasets import Row, load_problems
from grpo_math.problems.prompts import Template, template_of

EVAL_N = 128  # problems before and after a run: a difference of 10 points is sure in most
EVAL_LENGTH = 2048  # tokens of a completion. With longer ones, so many problems would take hours
OVERLAP = 0.02  # share of the problems to evaluate on that may be trained on; one of MATH's is


@contextmanager
def naming(fields: Mapping[str, str]) -> Iterator[None]:
    """Name an argument that is refused inside as the recipe names it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(fields.get(error.field, error.field), error.value, error.reason, error.remedy) from None


@dataclass
class RecipeProblems:
    """Each set is read once, when it is asked for. ``settings`` has every field of the recipe."""

    settings: Mapping[str, Any]
    no_eval: str = "nothing is evaluated"  # the reason, if eval_n is left to its default and there are no problems

    @cached_property
    def template(self) -> Template:
        """Raises `ConfigError` for a prompt that cannot be made."""
        return template_of(self.settings)

    @cached_property
    def rows(self) -> list[Row]:
        """The training problems. Raises `UserError` if they cannot be read."""
        s = self.settings
        with naming({"split": "dataset_split", "n": "dataset_limit"}):
            how: dict[str, Any] = {"template": self.template, "seed": s["seed"], "skip_bad_rows": s["skip_bad_rows"]}
            return load_problems(
                s["dataset"], s["dataset_split"], limit=s["dataset_limit"], columns=s["columns"], **how
            )

    def sample(self, most: int) -> list[Row]:
        """At most so many training problems, evenly over the data."""
        return self.rows[:: -(-len(self.rows) // most)]

    @cached_property
    def held_out(self) -> list[Row]:
        """The problems to evaluate on: as many as the recipe asks for, or the default."""
        s = self.settings
        during = s["heldout_n"] if s["heldout_every"] else 0
        if s["eval_n"] is None and len(self._default) >= during:
            return self._default
        n = max(s["eval_n"] or 0, during)
        if not n:
            return []
        names = {"split": "eval_split", "n": "eval_n" if s["eval_n"] == n else "heldout_n"}
        columns = "columns"
        if s["eval_dataset"]:
            names |= {"dataset": "eval_dataset", "columns": "eval_columns"}
            columns = "eval_columns"
        with naming(names):
            rows = self._load(s["eval_split"], limit=n, columns=s[columns], skip_bad_rows=s["skip_bad_rows"])
        if len(rows) < (s["eval_n"] or 0):
            reason = f"is more than the {len(rows)} problems of {self.eval_dataset}, {s['eval_split']}"
            raise ConfigError("eval_n", s["eval_n"], reason, f"use {len(rows)} or less")
        return rows

    @property
    def eval_dataset(self) -> str:
        return self.settings["eval_dataset"] or self.settings["dataset"]

    def _load(self, split: str, **how: Any) -> list[Row]:
        return load_problems(self.eval_dataset, split, template=self.template, **how)

    @cached_property
    def _default(self) -> list[Row]:
        """At most `EVAL_N` problems that are not trained on. If there are none, ``no_eval`` says why."""
        s = self.settings
        if (s["max_completion_length"] or 0) > EVAL_LENGTH:
            self.no_eval = f"completions may be {s['max_completion_length']} tokens long"
            return []
        limit = EVAL_N
        try:
            if self.eval_dataset.partition(":")[0] == "generated":  # more problems than a level has are an error
                limit = min(EVAL_N, len(self._load(s["eval_split"], skip_bad_rows=True)))
            rows = self._load(s["eval_split"], limit=limit, skip_bad_rows=True)
        except (UserError, ValueError) as error:
            self.no_eval = str(error)
            return []
        trained = {row["problem"] for row in self.rows}
        equal = sum(row["problem"] in trained for row in rows)
        if s["eval_dataset"] or equal <= OVERLAP * len(rows):
            return rows
        self.no_eval = f"{equal} of {len(rows)} problems that {self.eval_dataset} has for it are trained on"
        return []

    @property
    def eval_n(self) -> int:
        """How many problems are evaluated before and after training."""
        n = self.settings["eval_n"]
        return len(self._default) if n is None else n

    @property
    def about_eval(self) -> str | None:
        """A line that says what the default of eval_n costs; None if the recipe states eval_n."""
        if self.settings["eval_n"] is not None:
            return None
        if not self.eval_n:
            return f"no verdict on the run: {self.no_eval}; eval_dataset names other problems"
        return (
            f"before and after training {self.eval_n} problems of {self.eval_dataset}, {self.settings['eval_split']}, "
            f"are evaluated: {2 * self.eval_n} completions more (eval_n: 0 leaves it)"
        )

    @cached_property
    def overlap(self) -> dict[str, Any] | None:
        """Which of the problems to evaluate on overlap with those to train on."""
        return contamination.overlap(self.held_out, self.rows) if self.held_out else None
