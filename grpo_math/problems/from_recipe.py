"""The problems of a recipe, for training and for evaluation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError, DataError, UserError
from grpo_math.problems import contamination, stored
from grpo_math.problems.datasets import load_problems, problem_table
from grpo_math.problems.problem import Problem
from grpo_math.problems.prompts import Template, recipe_template
from grpo_math.problems.sources import folder_name
from grpo_math.problems.stored import cached_with_rows, rows_with
from grpo_math.run.resume import problem_hashes, short_hash
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.table_files import is_table

HELDOUT_N = 64  # problems in an evaluation during training
EVAL_N = 128  # problems before and after a run: enough to confirm most differences of 10 points
MAX_HELDOUT = 256  # at most this many problems of a file are held out, and at most a tenth of the file


@contextmanager
def renamed_error_fields(fields: Mapping[str, str]) -> Iterator[None]:
    """Replace the argument's name in an error by the recipe's field."""
    option = {"eval_columns": "--eval_columns", "heldout": "in heldout columns:"}.get(
        fields.get("columns", ""), "--columns"
    )
    try:
        yield
    except ConfigError as error:
        remedy = error.remedy.replace("--columns", option)
        raise ConfigError(fields.get(error.field, error.field), error.value, error.reason, remedy) from None
    except DataError as error:
        raise DataError(
            error.file, error.line, error.field, error.reason, error.remedy.replace("--columns", option)
        ) from None


class HeldOutSet(NamedTuple):
    """Problems that are evaluated during training. ``samples`` and ``temperature``: None for the authors' protocol."""

    data: str
    split: str
    rows: list[Problem]
    samples: int | None = None
    temperature: float | None = None


class EvaluationPlan(NamedTuple):
    """The problems that a run is evaluated on. `RecipeProblems.evaluation` makes the plan."""

    before_and_after: HeldOutSet | None
    during: list[HeldOutSet]
    line: str | None  # about the problems that are evaluated by default; None if the recipe names them


ENTRY_KEYS: dict[str, tuple[type, ...]] = {  # the keys of an entry of heldout, and the types of their values
    **dict.fromkeys(("data", "split"), (str,)),
    "columns": (str, dict),
    **dict.fromkeys(("n", "samples"), (int,)),
    "temperature": (int, float),
}


def evaluation_settings(s: RunSettings) -> dict[str, Any]:
    """Return the settings of transformers that follow from a recipe's: when to evaluate, and what the best model is.

    >>> s = RunSettings({"heldout_every": 5, "heldout": [{"data": "math500"}], "keep_best": True})
    >>> derived = evaluation_settings(s)
    >>> derived["eval_strategy"], derived["eval_steps"], derived["metric_for_best_model"]
    ('steps', 5, 'eval_math500_accuracy')
    """
    # TRL requires the batches of its evaluation to consist of whole groups. Held-out sets use other batches.
    derived: dict[str, Any] = {"num_generations_eval": 1} if s.evaluates else {}
    if s.heldout_every:
        derived |= {"eval_strategy": "steps", "eval_steps": s.heldout_every}
    # transformers' default is the loss, which held-out sets do not have.
    has_best = s.keeps_best or s.load_best_model_at_end or s.save_strategy == "best"
    if s.metric_for_best_model is None and (has_best or s.lr_scheduler_type == "reduce_lr_on_plateau"):
        # The accuracy of the first set that is evaluated during training.
        data = s.heldout[0].get("data") if s.heldout else s.eval_dataset or s.dataset
        derived["metric_for_best_model"] = f"eval_{folder_name(str(data))}_accuracy"
    if s.keeps_best and s.save_total_limit == 1:
        # With a limit of 1, transformers deletes all checkpoints but the best at the end of its loop, before the run
        # has ended.
        derived["save_total_limit"] = 2
    return derived


def checked_entries(entries: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the entries of ``heldout``. Raises `ConfigError` for one that is not a set, and for a set named twice."""
    for entry in entries:
        # Not isinstance: true is an int in Python.
        typed = all(type(entry[key]) in ENTRY_KEYS.get(key, ()) for key in entry)
        if "data" not in entry or not typed or entry.get("n", 1) < 1:
            remedy = f"write {{data: math500, n: 100}}; the keys are {', '.join(ENTRY_KEYS)}"
            raise ConfigError("heldout", entry, "is not a set to evaluate", remedy)
    names = [entry["data"] for entry in entries]
    if len({*names}) < len(names):
        raise ConfigError("heldout", names, "names a set twice", "name each once")
    return entries


@dataclass
class RecipeProblems:
    """The problems of a recipe. Each set is read once, at its first use."""

    settings: RunSettings
    notes: list[str] = field(default_factory=list)  # lines about the training data, after `rows`

    @cached_property
    def template(self) -> Template:
        """The prompt template. Raises `ConfigError` if a prompt cannot be made."""
        return recipe_template(self.settings.values())

    @property
    def rows(self) -> Any:
        """The training problems: a list, or a `datasets.Dataset` if they are many. Raises `UserError` if they cannot be
        read."""
        return self._divided[0]

    @cached_property
    def _divided(self) -> tuple[Any, list[Problem]]:
        """The training problems, and the problems of the same file that are held out for evaluation."""
        s = self.settings
        fields = {"split": "dataset_split", "limit": "dataset_limit"}
        split, limit = s.dataset_split, s.dataset_limit
        options = {"limit": limit, "seed": s.seed, "warn": self.notes.append}
        rows = self._load(fields, s.dataset, split, s.columns, problem_table, **options)
        if not self._is_divided or not (s.eval_n != 0 or s.evaluates_default_set):
            return rows, []
        positions = cached_with_rows(rows, "held_out", lambda: _heldout_set(rows))
        return stored.without(rows, positions), self._select(rows, positions)

    @property
    def _is_divided(self) -> bool:
        """True if a part of a file is to be held out, because the recipe names no problems to evaluate on."""
        s = self.settings
        return not s.eval_dataset and "[" not in s.dataset_split + s.eval_split and is_table(s.dataset)

    def _select(self, rows: Any, positions: Sequence[int]) -> list[Problem]:
        """Return the problems at these positions."""
        if isinstance(rows, list):
            return [rows[position] for position in positions]
        problems = rows.select(positions).to_list()
        # A table adds to each message the keys of the others.
        return [{**row, "prompt": self.template.prompt(row["problem"], row["prompt"])} for row in problems]

    def _load(
        self,
        fields: Mapping[str, str],
        dataset: str,
        split: str,
        columns: Any,
        load: Callable[..., Any] = load_problems,
        **options: Any,
    ) -> Any:
        """Load problems. An error names the recipe's field: ``fields`` has those with another name."""
        with renamed_error_fields(fields):
            return load(
                dataset,
                split,
                columns=columns,
                template=self.template,
                skip_bad_rows=self.settings.skip_bad_rows,
                **options,
            )

    def sample(self, most: int) -> list[Problem]:
        """Return at most ``most`` training problems, spread evenly over the data."""
        return self._select(self.rows, range(0, len(self.rows), -(-len(self.rows) // most)))

    def first(self, n: int) -> list[Problem]:
        """Return the first ``n`` training problems."""
        return self._select(self.rows, range(min(n, len(self.rows))))

    def to_evaluate(self, limit: int) -> HeldOutSet:
        """Load problems of the set that is evaluated before and after training: one greedy completion of each."""
        s, prefix = self.settings, "eval_" if self.settings.eval_dataset else ""
        dataset, columns = (s.eval_dataset, s.eval_columns) if s.eval_dataset else (s.dataset, s.columns)
        # A file has one split. If the recipe evaluates without naming problems, some of the file's are held out.
        rows = self._divided[1]
        if not rows:
            fields = {
                "dataset": f"{prefix}dataset",
                "columns": f"{prefix}columns",
                "split": "eval_split",
                "limit": "eval_n",
            }
            rows = self._load(fields, dataset, s.eval_split, columns, limit=limit)
        return HeldOutSet(dataset, s.eval_split, rows, samples=1, temperature=0.0)

    @cached_property
    def evaluation(self) -> EvaluationPlan:
        """The problems of the evaluations before, during and after training. They are not trained on."""
        s, held_out = self.settings, self._divided[1]
        n, lines = EVAL_N if s.eval_n is None else s.eval_n, []
        if held_out:
            lines.append(
                f"{len(held_out)} of the {len(self.rows) + len(held_out)} problems of {s.dataset} are held out of "
                "training by a hash, to evaluate on (dataset_split and eval_split choose others)"
            )
        elif self._is_divided and (n or s.evaluates_default_set):
            few = f"{len(self.rows)} problems of {s.dataset} are too few to hold a tenth out of training"
            lines.append(f"{few}, so the evaluation is on training problems (eval_dataset names others)")
        compared = None
        try:
            if n:
                compared = self.to_evaluate(n)
                compared = compared._replace(rows=compared.rows[:n])
        except UserError as error:
            if s.eval_n or s.evaluates_default_set:
                raise
            # The recipe does not name these problems, so the run does not need them.
            lines.append(f"no evaluation before and after training: {error}; set eval_dataset to other problems")
        if compared and s.eval_n is None:
            lines.append(
                f"before and after training {len(compared.rows)} problems of {compared.data}, {compared.split}, "
                f"are evaluated: {2 * len(compared.rows)} additional completions (eval_n: 0 turns it off)"
            )
        elif compared and not held_out and len(compared.rows) < n:
            reason = f"is more than the {len(compared.rows)} problems of {compared.data}, {compared.split}"
            raise ConfigError("eval_n", n, reason, f"use {len(compared.rows)} or less, or --eval_n 0")
        return EvaluationPlan(compared, self._during(compared), "; ".join(lines) or None)

    def _during(self, compared: HeldOutSet | None) -> list[HeldOutSet]:
        """Return the sets of the evaluations during training: without problems of ``compared``, if enough are left."""
        s, taken = self.settings, {row["problem"] for row in compared.rows} if compared else set()
        entries = checked_entries(s.heldout)

        def others(rows: list[Problem], n: int | None) -> list[Problem]:
            rest = [row for row in rows if row["problem"] not in taken]
            return (rows if len(rest) < min(n or HELDOUT_N, len(rows)) else rest)[:n]

        if s.evaluates_default_set:
            # A larger draw contains a smaller one, so that this many other problems are drawn.
            default = self.to_evaluate(HELDOUT_N + (len(compared.rows) if compared else 0))
            return [default._replace(rows=others(default.rows, HELDOUT_N))]
        sets = []
        for entry in entries if s.evaluates else ():
            n, split = entry.get("n"), entry.get("split", "test")
            more = len(compared.rows) if compared and (entry["data"], split) == (compared.data, compared.split) else 0
            fields = dict.fromkeys(("dataset", "split", "columns", "limit"), "heldout")
            rows = self._load(fields, entry["data"], split, entry.get("columns"), limit=n and n + more)
            sets.append(
                HeldOutSet(entry["data"], split, others(rows, n), entry.get("samples"), entry.get("temperature"))
            )
        return sets

    @cached_property
    def overlap(self) -> dict[str, Any] | None:
        """The overlap of the problems of before and after with the training problems; None without such problems."""
        compared = self.evaluation.before_and_after
        return self.overlaps({"": compared.rows})[""] if compared else None

    def overlaps(self, sets: Mapping[str, Sequence[Problem]]) -> dict[str, dict[str, Any]]:
        """Return the overlap of each set with the training problems."""
        key = short_hash([[name, [row["problem"] for row in rows]] for name, rows in sets.items()])
        return cached_with_rows(self.rows, f"overlap-{key}", lambda: contamination.overlaps(sets, self.rows))

    @cached_property
    def hashes(self) -> str:
        """The hash of each training problem, one a line."""
        return cached_with_rows(self.rows, "hashes", lambda: problem_hashes(rows_with(self.rows, "problem", "answer")))


def _heldout_set(rows: Any) -> list[int]:
    """Return the positions of the problems of a file that are held out: those with the smallest hashes."""
    import numpy

    # A hash keeps a problem on its side when other problems are added. Equal problems are on the same side.
    digests = (sha256(row["problem"].encode()).digest() for row in rows_with(rows, "problem"))
    hashes = numpy.fromiter(digests, "S32", len(rows))
    different = numpy.unique(hashes)
    return numpy.flatnonzero(hashes < different[min(len(different) // 10, MAX_HELDOUT)]).tolist()
