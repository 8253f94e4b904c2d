"""Compare several runs: before and after, the difference from the first run, and the settings that differ.

Two runs are compared only on the same problems. Runs that differ in the seed alone have a mean difference over seeds.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_math.errors import escaped
from grpo_math.evaluation.evaluation import Evaluation, ResultsError
from grpo_math.evaluation.paired import compare
from grpo_math.evaluation.stats import PairedDifference, SeedsDifference, over_seeds
from grpo_math.evaluation.tables import aligned, points
from grpo_math.report.outcome import Outcome, outcome
from grpo_math.report.page import NO_SETTINGS
from grpo_math.report.progress import progress, spent
from grpo_math.report.render import flat
from grpo_math.report.run_dir import RunDir, read_run

# These differ between any two runs.
UNCOMPARED_SETTINGS = (*NO_SETTINGS, "output_dir", "logging_dir", "run_name", "hub_model_id")
LAUNCHED = ("num_processes", "distributed_type")  # the launcher chooses them, so they are in no recipe
HEADER = ["", "steps", "n", "before", "after", "difference, 95% interval", "against the first run"]


def compare_runs(run_dirs: Sequence[str | Path]) -> tuple[dict[str, Any], str]:
    """Return the metrics of each run, the settings that differ, the seeds and the notes; and all of it as text."""
    runs = [read_run(name) for name in run_dirs]
    # These two also add notes to the runs, so the notes are collected after them.
    against = [None, *(_against(run, runs[0]) for run in runs[1:])]
    outcomes, settings = [outcome(run) for run in runs], differing(runs)
    rows = [_row(*of_run) for of_run in zip(runs, outcomes, against, strict=True)]
    seeds = _seeds(runs, outcomes, settings)
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    lines = [aligned([HEADER, *(_cells(*of_run) for of_run in zip(runs, outcomes, against, strict=True))])]
    lines += [escaped(f"{name}: {'; '.join(map(str, each))}") for name, each in settings.items()]
    lines += [f"seeds    {points(seeds)} over {seeds.n} seeds"] if seeds else []
    result = {"runs": rows, "settings": settings, "seeds": seeds and seeds._asdict(), "notes": notes}
    return result, "\n".join(lines)


def _cells(run: RunDir, of_run: Outcome, against: PairedDifference | None) -> list[str]:
    """Return the row of a run in the table."""
    differences = (of_run.comparison and of_run.comparison.accuracy, against)
    return [
        escaped(run.name),
        str(progress(run).step),
        str(run.after.summary.n) if run.after else "",
        *(f"{side.summary.accuracy.value:.1%}" if side else "" for side in (run.before, run.after)),
        *(points(paired) if paired else "" for paired in differences),
    ]


def _seeds(runs: Sequence[RunDir], outcomes: Sequence[Outcome], settings: Mapping[str, Any]) -> SeedsDifference | None:
    """Return the mean difference over runs that differ in the seed alone, else None."""
    differences = [of_run.comparison.accuracy.difference for of_run in outcomes if of_run.comparison]
    seeds = {str(run.config.get("seed")) for run in runs}
    # Two runs of one seed are one run.
    if not settings.keys() <= {"seed", "data_seed"} or not len(seeds) == len(differences) == len(runs):
        return None
    return over_seeds(differences)


def _against(run: RunDir, first: RunDir) -> PairedDifference | None:
    """Return the difference of a run's model from the first run's on the same problems."""
    try:
        return compare(first.after, run.after).accuracy if first.after and run.after else None
    except ResultsError as error:
        run.notes.append(f"not compared with {first.name}: {error}")
        return None


def _row(run: RunDir, of_run: Outcome, against: PairedDifference | None) -> dict[str, Any]:
    """Return the metrics of a run. ``against``: its difference from the first run."""
    state = progress(run)
    return {
        "run_dir": str(run.directory),
        "model": run.model,
        "step": state.step,
        "steps": state.total,
        "n": run.after.summary.n if run.after else None,
        "before": run.before and _metrics(run.before),
        "after": run.after and _metrics(run.after),
        "difference": of_run.comparison and _difference(of_run.comparison.accuracy),
        "against_first": against and _difference(against),
        "seconds": round(sum(spent(run).values()), 1),
    }


def _metrics(evaluation: Evaluation) -> dict[str, Any]:
    (accuracy, ci95, n), in_format = evaluation.summary.accuracy, evaluation.summary.accuracy_in_format
    return {"accuracy": accuracy, "accuracy_in_format": in_format, "ci95": ci95, "n": n}


def _difference(paired: PairedDifference) -> dict[str, Any]:
    return {"difference": paired.difference, "ci95": paired.ci95}


def differing(runs: Sequence[RunDir]) -> dict[str, list[str | None]]:
    """Return the settings that differ, each with its value in every run; None if a run lacks it.

    A setting that is in no recipe is left out: its value is a default, or follows from the others.

    >>> configs = ({"seed": 1, "eval_steps": n, "stated": {"heldout_every": n}, "heldout_every": n} for n in (5, 10))
    >>> differing([RunDir(Path("x"), config=config) for config in configs])
    {'heldout_every': ['5', '10']}
    """
    explicit = {name for run in runs for name in run.config.get("stated", run.config)} | set(LAUNCHED)
    names = explicit - set(UNCOMPARED_SETTINGS)
    tables = [dict(flat({k: v for k, v in run.config.items() if k in names})) for run in runs]
    values = {name: [table.get(name) for table in tables] for name in sorted(set().union(*tables))}
    return {name: each for name, each in values.items() if len(set(each)) > 1}
