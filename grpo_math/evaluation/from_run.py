"""Read a finished run for `grpo-math evaluate --run`: base and trained model, template and lengths."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError, UserError
from grpo_math.evaluation.evaluation import read as read_results
from grpo_math.evaluation.fingerprint import problems_hash
from grpo_math.generation.models import loading
from grpo_math.generation.request import DEFAULT_REQUEST, Request, request_from
from grpo_math.problems.from_recipe import EVAL_N, HeldOutSet, RecipeProblems
from grpo_math.problems.prompts import Template, recipe_template
from grpo_math.run import checkpoints
from grpo_math.run.resume import PROBLEMS, problem_hash, run_config
from grpo_math.run.weights import weights_in
from grpo_math.settings.run_settings import RunSettings
from grpo_math.settings.start_adapter import FILES, adapter_folder
from grpo_math.settings.translate import is_off, refuse_not_here
from grpo_math.system.reading import home, is_folder, near


class RunModels(NamedTuple):
    """The models and settings of a run, or one model, named "", without a run. ``folder`` is for the results files."""

    models: dict[str, tuple[str, str | None]]  # model and adapter of base and trained
    folder: Path
    template: Template | None = None
    request: Request = DEFAULT_REQUEST
    columns: Mapping[str, str | None] = MappingProxyType({})  # those of each data set that the recipe names
    grade_timeout: float | None = None


def read(run_dir: str, output: str | None = None, checkpoint: str | None = None) -> RunModels:
    """Read a run. ``checkpoint``: the checkpoint with the trained weights (`checkpoints.named`); by default the last.

    Raises `ConfigError` if the folder is not a run directory, or if the run has not finished.
    """
    run, remedy = Path(run_dir), "give a run directory; evaluate takes a model as --model"
    config = run_config(run) or {}
    name = config.get("model_name_or_path")
    if not isinstance(name, str):
        raise ConfigError("run", run_dir, "has no config.yaml with a model name", near(run) or remedy)
    if output is not None and output.endswith(".json"):
        raise ConfigError("output", output, "is one file, and --run writes two", "give a folder")
    for field, value in config.items():
        if not is_off(value):
            refuse_not_here(field, value, field)
    base = _revision_folder(name, str(config.get("model_revision") or "main"))
    trained_folder = checkpoints.named(run, checkpoint)
    if (trained_weights := weights_in(trained_folder)) is None:
        reason = "has neither adapter/ nor model/, so it has not finished"
        raise ConfigError("run", run_dir, reason, "repeat the command that started it, which resumes it")
    kind, weights = trained_weights
    trained = (base, str(weights)) if kind == "adapter" else (str(weights), None)
    # A run that has trained an adapter further began with that adapter, and not with the base alone.
    if (start := config.get("adapter")) and not is_folder(start):
        start = str(adapter_folder(start, FILES))
    # By the checkpoint's own name, because "best" may be another one tomorrow.
    default = f"evaluation-{trained_folder.name}" if checkpoint else "evaluation"
    columns = {entry["data"]: entry.get("columns") for entry in config.get("heldout") or ()}
    columns |= {config.get("eval_dataset"): config.get("eval_columns")}
    columns |= {config.get("dataset"): config.get("columns")}
    return RunModels(
        models={"base": (base, start), "trained": trained},
        template=(template := recipe_template(config)),
        request=replace(request_from(config), template=template.name),
        columns={os.path.abspath(home(data)): columns for data, columns in columns.items() if data},
        folder=run / default if output is None else Path(output),
        grade_timeout=config.get("grade_timeout"),
    )


def own_set(run_dir: str, template: Template, n: int | None = None) -> HeldOutSet:
    """Return the problems that training evaluates before and after; ``n`` of them, or as many as the recipe states."""
    config = run_config(Path(run_dir)) or {}
    if not config.get("dataset"):
        raise UserError("--data is missing: the run's config.yaml names no data set")
    number = n or config.get("eval_n") or EVAL_N
    asked = {
        "prompt_template": template.name,
        "system_prompt": template.system,
        "answer_format": template.answer_format,
    }
    held_out = RecipeProblems(RunSettings({**config, **asked, "eval_n": number})).to_evaluate(number)
    return held_out._replace(rows=held_out.rows[:number])


def earlier_results(run_dir: str, rows: Sequence[Mapping[str, Any]], samples: int, temperature: float) -> list[Path]:
    """Return the results files of training that have these problems, with as many samples at this temperature."""
    files = [file for name in ("before", "after") if (file := Path(run_dir) / f"{name}.json").exists()]
    results = {file: read_results(file) for file in files}
    requested = (problems_hash(rows), samples, temperature)
    return [file for file, one in results.items() if (one.problems_hash, one.samples, one.temperature) == requested]


def trained_on(run_dir: str, rows: Sequence[Mapping[str, Any]]) -> int:
    """Return how many of the problems a run was trained on."""
    file = Path(run_dir) / PROBLEMS
    hashes = set(file.read_text(encoding="utf-8").split()) if file.exists() else set()
    return sum(problem_hash(row) in hashes for row in rows)


def recipe_columns(run: RunModels, data: str) -> str | None:
    """Return the columns that the run's recipe states for a data set; None if it states none."""
    return run.columns.get(os.path.abspath(home(data)))


def _revision_folder(name: str, revision: str) -> str:
    """Return the model's name, or the downloaded folder of a revision other than main."""
    if revision == "main":
        return name
    from huggingface_hub import snapshot_download

    with loading(name, f"revision {revision}"):
        # The model is then a folder, so that everything that takes a name loads this revision.
        return snapshot_download(name, revision=revision)
