"""Several runs -> one page: before and after with intervals, the settings that differ, their curves together.

Does not evaluate, and compares two runs only on the same problems.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError
from grpo_math.evaluation import compare
from grpo_math.evaluation.stats import PairedDifference
from grpo_math.report import plots
from grpo_math.report.page import paired_of, side
from grpo_math.report.progress import duration, progress, spent
from grpo_math.report.render import flat, page, write
from grpo_math.report.run_dir import Run, read_run
from grpo_math.run import metrics

COLOURS = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE, plots.INK, plots.MUTED)
CURVES = {
    metrics.REWARD: "Average reward",
    metrics.ACCURACY: "Accuracy of training completions",
    metrics.HELDOUT_ACCURACY: "Held-out accuracy",
    metrics.LENGTH_MEAN: "Completion length",
}
# These differ between any two runs, or are elsewhere on the page.
APART = ("output_dir", "logging_dir", "run_name", "command", "stated", "hub_model_id", "versions")


class Compared(NamedTuple):
    """What `report_several` wrote: the figures of each run as in the table, and the settings that differ by name."""

    html: Path
    runs: list[dict[str, Any]]
    settings: dict[str, list[str | None]]
    notes: list[str]


def report_several(run_dirs: Sequence[str | Path], output: str | Path | None = None) -> Compared:
    """Write one page on several runs: ``output``, or comparison.html in the folder that holds them all."""
    if len({Path(name).resolve() for name in run_dirs}) < len(run_dirs):
        raise ConfigError("run_dir", " ".join(map(str, run_dirs)), "names a run twice", "give each run once")
    if len(run_dirs) > len(ascii_uppercase):
        raise ConfigError("run_dir", len(run_dirs), "are too many runs for a page", "give 26 at most")
    runs = [read_run(name) for name in run_dirs]
    folder = Path(os.path.commonpath([Path(name).resolve().parent for name in run_dirs]))
    target = Path(output) if output else folder / "comparison.html"
    rows, settings, names = (
        [_row(run, runs[0]) for run in runs],
        differing(runs),
        [Path(name).resolve().name for name in run_dirs],
    )
    notes = [f"{run.directory.name}: {note}" for run in runs for note in run.notes]
    colours = [plots.CSS_COLOURS[colour] for _, colour in zip(runs, cycle(COLOURS), strict=False)]
    compared = list(zip(ascii_uppercase, colours, names, rows, strict=False))
    values = {"compared": compared, "settings": settings, "notes": notes, "duration": duration}
    title = f"{len(runs)} runs: {', '.join(names)}"
    write(target, page(title=title, figures={"training": _curves(runs)}, **values).encode("utf-8"))
    return Compared(target, rows, settings, notes)


def _row(run: Run, first: Run) -> dict[str, Any]:
    """Return the figures of a run, with its model's difference from the first run's on the same problems."""
    against = None
    if run is not first and run.after and first.after:
        try:
            against = compare.compare(first.after, run.after)
        except compare.ResultsError as error:
            run.notes.append(f"not compared with {first.directory.name}: {error}")
    state = progress(run)
    return {
        "run_dir": str(run.directory),
        "model": run.config.get("model_name_or_path") or (run.after or run.before or {}).get("model"),
        "step": state.step,
        "steps": state.total,
        "n": len(run.after["rows"]) if run.after else None,
        "before": side(run.before),
        "after": side(run.after),
        "difference": _difference(paired_of(run)),
        "against_first": _difference(against),
        "seconds": round(sum(spent(run).values()), 1),
    }


def _difference(paired: PairedDifference | None) -> dict[str, Any] | None:
    return paired and {"difference": paired.difference, "ci95": [paired.lo, paired.hi]}


def differing(runs: Sequence[Run]) -> dict[str, list[str | None]]:
    """Return the settings that differ, each with its value in every run; None if a run lacks it.

    >>> runs = [Run(Path(n), config={"seed": 1, "learning_rate": r}) for n, r in (("a", 0.1), ("b", 0.2))]
    >>> differing(runs)
    {'learning_rate': ['0.1', '0.2']}
    """
    tables = [dict(flat({k: v for k, v in run.config.items() if k not in APART})) for run in runs]
    values = {name: [table.get(name) for table in tables] for name in sorted(set().union(*tables))}
    return {name: each for name, each in values.items() if len(set(each)) > 1}


def _curves(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return a plot and its caption for each of `CURVES` that some run has, with a line per run under its letter."""
    drawn = [_with_ends(plots.condensed(run)) for run in runs]
    together = Run(runs[0].directory, history=[row for run in drawn for row in run.history])

    def draw(axes: Any, _: Run, panel: plots.Panel) -> None:
        key = panel.lines[0][0]
        for letter, colour, run in zip(ascii_uppercase, cycle(COLOURS), drawn, strict=False):
            plots.draw_line(axes, run, key, letter, colour)
        if metrics.METRICS[key].unit == "share":
            axes.set_ylim(0, 1.02)

    panels = [plots.Panel(title, ((key, "", plots.BLUE),), draw) for key, title in CURVES.items()]
    shown = [panel for panel in panels if any(panel.lines[0][0] in row for row in together.history)]
    meanings = [metrics.METRICS[panel.lines[0][0]].meaning for panel in shown]
    svgs = [plots.inline_svg(plots.render(together, [panel], "svg")) for panel in shown]
    return [(svg, [meaning]) for svg, meaning in zip(svgs, meanings, strict=True)]


def _with_ends(run: Run) -> Run:
    """Add the evaluations before and after training as the first and last held-out accuracy."""

    def line(step: float, results: compare.Results | None) -> list[dict[str, float]]:
        return [{metrics.STEP: step, metrics.HELDOUT_ACCURACY: compare.share(results)}] if results else []

    last = run.history[-1][metrics.STEP] if run.history else 0.0
    return replace(run, history=[*line(0.0, run.before), *run.history, *line(last, run.after)])
