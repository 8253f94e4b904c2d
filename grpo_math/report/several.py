"""Write one page on several runs: before and after with intervals, the settings that differ, their curves together.

Does not evaluate, and compares two runs only on the same problems.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.evaluation.compare import ResultsError, compare
from grpo_math.report.plots import COLOURS, CSS_COLOURS, Plot, curve, svg
from grpo_math.report.progress import duration, progress, spent
from grpo_math.report.render import flat, page
from grpo_math.report.run_dir import Run, read_run
from grpo_math.run import metrics
from grpo_math.run.files import replace_text

CURVES = {
    metrics.HELDOUT_ACCURACY: "Held-out accuracy",
    metrics.ACCURACY: "Accuracy of training completions",
    metrics.REWARD: "Reward",
    metrics.LENGTH_MEAN: "Completion length",
}
FIGURES = ("accuracy", "accuracy_in_format", "ci95", "n")  # of an evaluation
# These differ between any two runs, or are elsewhere on the page.
APART = ("output_dir", "logging_dir", "run_name", "command", "stated", "hub_model_id", "versions", "hardware")


def report_several(run_dirs: Sequence[str | Path], output: str | Path | None = None) -> dict[str, Any]:
    """Write one page on several runs: ``output``, or comparison.html in the folder that contains all of them.

    Return its path as ``html``, the figures of each run as in the table, the settings that differ, and the notes.
    """
    if len(run_dirs) > len(COLOURS):
        raise ConfigError("run_dir", len(run_dirs), "are too many runs for a page", f"give at most {len(COLOURS)}")
    runs = [read_run(name) for name in run_dirs]
    # This also adds notes to the runs, so the notes are collected after it.
    rows, settings = [_row(run, runs[0]) for run in runs], differing(runs)
    folder = Path(os.path.commonpath([Path(name).resolve().parent for name in run_dirs]))
    target = Path(output) if output else folder / "comparison.html"
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    text = page(
        title=f"{len(runs)} runs: {', '.join(run.name for run in runs)}",
        compared=list(zip(ascii_uppercase, CSS_COLOURS.values(), runs, rows, strict=False)),
        settings=settings,
        notes=notes,
        duration=duration,
        figures=_figures(runs),
        first=len(CURVES),
    )
    replace_text(target, text)
    return {"html": str(target), "runs": rows, "settings": settings, "notes": notes}


def _row(run: Run, first: Run) -> dict[str, Any]:
    """Return the figures of a run, with the difference of its model from the first run's on the same problems."""
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
        "before": run.before and {name: run.before[name] for name in FIGURES},
        "after": run.after and {name: run.after[name] for name in FIGURES},
        "difference": paired and {name: paired[name] for name in ("difference", "ci95")},
        "against_first": against and {"difference": against.difference, "ci95": [against.lo, against.hi]},
        "seconds": round(sum(spent(run).values()), 1),
    }


def differing(runs: Sequence[Run]) -> dict[str, list[str | None]]:
    """Return the settings that differ, each with its value in every run; None if a run lacks it.

    >>> runs = [Run(Path(n), config={"seed": 1, "learning_rate": r}) for n, r in (("a", 0.1), ("b", 0.2))]
    >>> differing(runs)
    {'learning_rate': ['0.1', '0.2']}
    """
    tables = [dict(flat({k: v for k, v in run.config.items() if k not in APART})) for run in runs]
    values = {name: [table.get(name) for table in tables] for name in sorted(set().union(*tables))}
    return {name: each for name, each in values.items() if len(set(each)) > 1}


def _figures(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a figure for each of `CURVES` that a run has, with a line per run under its letter."""
    figures = []
    for key, title in CURVES.items():
        plot = Plot(title, f"{metrics.METRICS[key].meaning}.".capitalize(), ((key, ""),))
        # A run without the metric keeps its colour.
        lines = [curve(run.evaluated_history, key, letter) for letter, run in zip(ascii_uppercase, runs, strict=False)]
        if any(line.steps for line in lines):
            figures.append(svg(plot, lines))
    return figures
