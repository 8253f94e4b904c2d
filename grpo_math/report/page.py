"""Write `report.html` and `plots/*.png` of a run, or one page on several runs.

The page on several runs has before and after with intervals, the settings that differ, and the curves together.

The model's output is hostile text: page.html escapes all text (render.py), and the page's content security policy runs
no script except its own and loads nothing.

Two runs are compared only on the same problems. checks/diagnosis.py has the findings.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple

from grpo_math.checks import Finding
from grpo_math.checks.diagnosis import CHECKS
from grpo_math.errors import ConfigError
from grpo_math.evaluation.evaluation import Evaluation, ResultsError
from grpo_math.evaluation.meaning import SEEDS
from grpo_math.evaluation.paired import compare
from grpo_math.evaluation.probe_results import Seeds, over_seeds, write_seeds
from grpo_math.evaluation.stats import PairedDifference
from grpo_math.report import viewer
from grpo_math.report.outcome import Outcome, outcome
from grpo_math.report.plots import COLOURS, CSS_COLOURS, FIRST, PLOTS, Plot, curve, curves, png, svg
from grpo_math.report.progress import duration, progress, spent
from grpo_math.report.render import flat, page
from grpo_math.report.run_dir import RunDir, read_run
from grpo_math.run import metrics
from grpo_math.run.earlier import REPORT, archive, in_the_way
from grpo_math.run.files import replace_text, writing

CHANGES_SHOWN = 5
NO_SETTINGS = ("command", "versions", "hardware", "stated")  # entries of config.yaml that are not settings
# These differ between any two runs, or are elsewhere on the page.
UNCOMPARED_SETTINGS = (*NO_SETTINGS, "output_dir", "logging_dir", "run_name", "hub_model_id")
LAUNCHED = ("num_processes", "distributed_type")  # the launcher chooses them, so they are in no recipe
CURVES = {
    metrics.HELDOUT_ACCURACY: "Held-out accuracy",
    metrics.ACCURACY: "Accuracy of training completions",
    metrics.REWARD: "Reward",
    metrics.LENGTH_MEAN: "Completion length",
}


class ReportFiles(NamedTuple):
    """The files and findings of `report`. ``notes``: a line for each part that is left out."""

    html: Path
    plots: list[Path]
    findings: list[Finding]
    notes: list[str]

    def _repr_html_(self) -> str:
        """Return the page for a notebook, in a frame that is isolated from the notebook."""
        text = escape(self.html.read_text(encoding="utf-8"))
        # Without allow-same-origin the page has a separate origin: its script cannot reach the notebook.
        return f'<iframe srcdoc="{text}" sandbox="allow-scripts" style="width: 100%; height: 50em; border: 0"></iframe>'


def print_notes(notes: list[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


# One run


def report(run_dir: str | Path) -> ReportFiles:
    """Draw ``plots/training.png`` and ``plots/details.png`` and write ``report.html`` into the run directory."""
    run = read_run(run_dir)
    of_run = outcome(run)
    drawn = [(plot, lines) for plot in PLOTS if (lines := curves(of_run.history, plot))] if run.history else []
    names = {f"plots/{name}.png": REPORT["plots/*.png"] for name in ("training", "details")}
    archive(run.directory, in_the_way(run.directory, {**REPORT, **names}))
    plots = []
    for name, part in {"training": drawn[:FIRST], "details": drawn[FIRST:]}.items():
        path = run.directory / "plots" / f"{name}.png"
        # An earlier run in this folder may have left a plot that this run does not draw.
        path.unlink(missing_ok=True)
        if part:
            path.parent.mkdir(exist_ok=True)
            with writing(path):
                path.write_bytes(png(part))
            plots.append(path)
    text = page(
        title=f"Run {run.name}",
        run=run,
        outcome=of_run,
        checks=list(CHECKS.values()),
        figures=[svg(plot, lines) for plot, lines in drawn],
        first=FIRST,
        progress=progress(run),
        spent=spent(run),
        duration=duration,
        date=_date(run),
        changes={viewer.CHANGES[0, 1]: "improvements", viewer.CHANGES[1, 0]: "regressions"},
        shown=CHANGES_SHOWN,
        categories=metrics.CATEGORIES,
        sources=viewer.sources(run, compared=of_run.comparison is not None),
        tables=_tables(run),
    )
    html = run.directory / "report.html"
    # A browser may reload the page of a run that is under way: it reads the old page or the new one, never a part.
    replace_text(html, text)
    return ReportFiles(html, plots, of_run.findings, run.notes)


def _date(run: RunDir) -> str:
    """Return the day on which the run wrote its last step, or its settings."""
    paths = [run.directory / name for name in ("history.jsonl", "config.yaml")]
    times = [path.stat().st_mtime for path in paths if path.exists()]
    return f"{datetime.fromtimestamp(times[0]):%Y-%m-%d}" if times else ""


def _tables(run: RunDir) -> dict[str, dict[str, str]]:
    """Return the settings of the recipe, the remaining settings, and the versions."""
    explicit = dict(flat(run.config.get("stated") or {}))
    settings = dict(flat({name: value for name, value in run.config.items() if name not in NO_SETTINGS}))
    defaults = {name: value for name, value in settings.items() if name not in explicit}
    return {
        "Set by the recipe": explicit,
        "Defaults" if explicit else "Settings": defaults,
        "Versions": dict(flat(run.config.get("versions") or {})),
    }


# Several runs


def report_several(run_dirs: Sequence[str | Path], output: str | Path | None = None) -> dict[str, Any]:
    """Write one page on several runs: ``output``, or comparison.html in the folder that contains all of them.

    Return its path as ``html``, the metrics of each run as in the table, the settings that differ, and the notes.
    """
    if len(run_dirs) > len(COLOURS):
        raise ConfigError("run_dir", len(run_dirs), "are too many runs for a page", f"give at most {len(COLOURS)}")
    runs = [read_run(name) for name in run_dirs]
    # These two also add notes to the runs, so the notes are collected after them.
    against = [None, *(_against(run, runs[0]) for run in runs[1:])]
    outcomes, settings = [outcome(run) for run in runs], differing(runs)
    rows = [_row(*of_run) for of_run in zip(runs, outcomes, against, strict=True)]
    folder = Path(os.path.commonpath([Path(name).resolve().parent for name in run_dirs]))
    target = Path(output) if output else folder / "comparison.html"
    seeds = _seeds(runs, outcomes, settings)
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    text = page(
        title=f"{len(runs)} runs: {', '.join(run.name for run in runs)}",
        compared=list(zip(ascii_uppercase, CSS_COLOURS.values(), runs, rows, strict=False)),
        settings=settings,
        seeds=seeds,
        seeds_words=SEEDS,
        notes=notes,
        duration=duration,
        figures=_figures(outcomes),
        first=len(CURVES),
    )
    replace_text(target, text)
    return {"html": str(target), "runs": rows, "settings": settings, "seeds": seeds and seeds._asdict(), "notes": notes}


def _seeds(runs: Sequence[RunDir], outcomes: Sequence[Outcome], settings: Mapping[str, Any]) -> Seeds | None:
    """Return the mean difference over runs that differ in the seed alone, and write it for the report of each; else
    None."""
    differences = [of_run.comparison.accuracy.difference for of_run in outcomes if of_run.comparison]
    seeds = {str(run.config.get("seed")) for run in runs}
    # Two runs of one seed are one run.
    if not settings.keys() <= {"seed", "data_seed"} or not len(seeds) == len(differences) == len(runs):
        return None
    result = over_seeds(differences)
    for run in runs:
        write_seeds(result, run.after.problems_hash if run.after else None, run.directory / "evaluation")
    return result


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


def _figures(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return a figure for each of `CURVES` that a run has, with a line per run under its letter."""
    figures = []
    for key, title in CURVES.items():
        plot = Plot(title, f"{metrics.METRICS[key].meaning}.".capitalize(), ((key, ""),))
        # A run without the metric keeps its colour.
        lines = [curve(one.history, key, letter) for letter, one in zip(ascii_uppercase, outcomes, strict=False)]
        if any(line.steps for line in lines):
            figures.append(svg(plot, lines))
    return figures
