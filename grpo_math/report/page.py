"""Write `report.html` and `plots/*.png` of a run, or one page on several runs.

The page on several runs has before and after with intervals, the settings that differ, and the curves together.

The model's output is hostile text: page.html escapes all text (render.py), formulas are MathML of known elements
(formulas.py), and the page's content security policy runs no script except its own and loads nothing.

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
from grpo_math.evaluation.meaning import SEEDS, SEEDS_FILE, over_seeds
from grpo_math.evaluation.paired import ResultsError, compare
from grpo_math.report import viewer
from grpo_math.report.plots import COLOURS, CSS_COLOURS, FIRST, PLOTS, Plot, curve, curves, png, svg
from grpo_math.report.progress import duration, progress, spent
from grpo_math.report.render import flat, page
from grpo_math.report.run_dir import RunDir, read_run, set_rows
from grpo_math.run import metrics
from grpo_math.run.earlier import REPORT, archive, in_the_way
from grpo_math.run.files import replace_text, write_json, writing

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
METRICS_SHOWN = ("accuracy", "accuracy_in_format", "ci95", "n")  # of an evaluation, in the page on several runs


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
    findings = run.findings
    drawn = [(plot, lines) for plot in PLOTS if (lines := curves(run.evaluated_history, plot))] if run.history else []
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
        findings=findings,
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
        sources=viewer.sources(run),
        tables=_tables(run),
        sets=set_rows(run),
    )
    html = run.directory / "report.html"
    # A browser may reload the page of a run that is under way: it reads the old page or the new one, never a part.
    replace_text(html, text)
    return ReportFiles(html, plots, findings, run.notes)


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
    # This also adds notes to the runs, so the notes are collected after it.
    rows, settings = [_row(run, runs[0]) for run in runs], differing(runs)
    folder = Path(os.path.commonpath([Path(name).resolve().parent for name in run_dirs]))
    target = Path(output) if output else folder / "comparison.html"
    seeds = _seeds(runs, settings)
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    text = page(
        title=f"{len(runs)} runs: {', '.join(run.name for run in runs)}",
        compared=list(zip(ascii_uppercase, CSS_COLOURS.values(), runs, rows, strict=False)),
        settings=settings,
        seeds=seeds,
        seeds_words=SEEDS,
        notes=notes,
        duration=duration,
        figures=_figures(runs),
        first=len(CURVES),
    )
    replace_text(target, text)
    return {"html": str(target), "runs": rows, "settings": settings, "seeds": seeds, "notes": notes}


def _seeds(runs: Sequence[RunDir], settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the mean difference over runs that differ in the seed alone, and write it for the report of each; else
    None."""
    differences = [run.comparison["difference"] for run in runs if run.comparison]
    seeds = {str(run.config.get("seed")) for run in runs}
    # Two runs of one seed are one run.
    if not settings.keys() <= {"seed", "data_seed"} or not len(seeds) == len(differences) == len(runs):
        return None
    result = over_seeds(differences)
    for run in runs:
        file = run.directory / "evaluation" / SEEDS_FILE
        file.parent.mkdir(exist_ok=True)
        write_json(file, {"seeds": result, "problems_hash": run.after and run.after.get("problems_hash")})
    return result


def _row(run: RunDir, first: RunDir) -> dict[str, Any]:
    """Return the metrics of a run, with the difference of its model from the first run's on the same problems."""
    against = None
    if run is not first and run.after and first.after:
        try:
            against = compare(first.after, run.after)
        except ResultsError as error:
            run.notes.append(f"not compared with {first.name}: {error}")
    paired, state = run.comparison, progress(run)
    return {
        "run_dir": str(run.directory),
        "model": run.model,
        "step": state.step,
        "steps": state.total,
        "n": run.after["n"] if run.after else None,
        "before": run.before and {name: run.before[name] for name in METRICS_SHOWN},
        "after": run.after and {name: run.after[name] for name in METRICS_SHOWN},
        "difference": paired and {name: paired[name] for name in ("difference", "ci95")},
        "against_first": against and {"difference": against.difference, "ci95": [against.lo, against.hi]},
        "seconds": round(sum(spent(run).values()), 1),
    }


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


def _figures(runs: Sequence[RunDir]) -> list[dict[str, Any]]:
    """Return a figure for each of `CURVES` that a run has, with a line per run under its letter."""
    figures = []
    for key, title in CURVES.items():
        plot = Plot(title, f"{metrics.METRICS[key].meaning}.".capitalize(), ((key, ""),))
        # A run without the metric keeps its colour.
        lines = [curve(run.evaluated_history, key, letter) for letter, run in zip(ascii_uppercase, runs, strict=False)]
        if any(line.steps for line in lines):
            figures.append(svg(plot, lines))
    return figures
