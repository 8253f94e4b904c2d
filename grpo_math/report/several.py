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
from grpo_math.evaluation.stats import PairedDifference, wilson
from grpo_math.reading import real
from grpo_math.report import plots
from grpo_math.report.html import escaped, flat, part, percent, points, section, write
from grpo_math.report.page import paired_of
from grpo_math.report.progress import duration, progress, spent
from grpo_math.report.run_dir import Run, read_run
from grpo_math.run import metrics
from grpo_math.run.metrics import IN_FORMAT, RIGHT

COLOURS = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE, plots.INK, plots.MUTED)
CURVES = (
    ("Average reward", metrics.REWARD),
    ("Accuracy of training completions", metrics.ACCURACY),
    ("Held-out accuracy", metrics.HELDOUT_ACCURACY),
    ("Completion length", metrics.LENGTH_MEAN),
)
# Of a run's own place and time, or told elsewhere on the page.
APART = ("output_dir", "logging_dir", "run_name", "command", "stated", "hub_model_id", "versions")


class Compared(NamedTuple):
    """What `report_several` wrote: a row for each run as in the table, and the settings that differ by name."""

    html: Path
    runs: list[dict[str, Any]]
    settings: dict[str, list[str | None]]
    notes: list[str]


def report_several(run_dirs: Sequence[str | Path], output: str | Path | None = None) -> Compared:
    """Write one page on several runs: ``output``, or comparison.html in the folder that holds them all."""
    if len({real(name) for name in run_dirs}) < len(run_dirs):
        raise ConfigError("run_dir", " ".join(map(str, run_dirs)), "names a run twice", "give each run once")
    if len(run_dirs) > len(ascii_uppercase):
        raise ConfigError("run_dir", len(run_dirs), "are too many runs for a page", "give 26 at most")
    runs = [read_run(name) for name in run_dirs]
    together = os.path.commonpath([real(name).parent for name in run_dirs])
    page = Path(output) if output else Path(together) / "comparison.html"
    rows = [_row(run, runs[0]) for run in runs]
    settings = differing(runs)
    notes = [f"{run.directory.name}: {note}" for run in runs for note in run.notes]
    write(page, _page(runs, rows, settings, notes).encode("utf-8"))
    return Compared(page, rows, settings, notes)


def _row(run: Run, first: Run) -> dict[str, Any]:
    """Of one run: its figures, and its model's difference from the first run's on the same problems."""
    paired, against = paired_of(run), None
    if run is not first and run.after and first.after:
        try:
            against = compare.compare(first.after, run.after)
        except compare.ResultsError as error:
            run.notes.append(f"not compared with {first.directory.name}: {error}")
    found = progress(run)
    return {
        "run_dir": str(run.directory),
        "model": run.config.get("model_name_or_path") or (run.after or run.before or {}).get("model"),
        "step": found.step,
        "steps": found.total,
        "n": len(run.after["rows"]) if run.after else None,
        **{name: _side(results) for name, results in (("before", run.before), ("after", run.after))},
        "difference": _difference(paired),
        "against_first": _difference(against),
        "seconds": round(sum(spent(run).values()), 1),
    }


def _side(results: compare.Results | None) -> dict[str, Any] | None:
    if not results:
        return None
    interval = wilson(compare.count(results, *RIGHT), len(results["rows"]))
    shares = {metrics.ACCURACY: compare.share(results), metrics.ACCURACY_IN_FORMAT: compare.share(results, IN_FORMAT)}
    return {**shares, "ci95": results.get("ci95") or list(interval)}


def _difference(paired: PairedDifference | None) -> dict[str, Any] | None:
    return paired and {"difference": paired.difference, "ci95": [paired.lo, paired.hi]}


def differing(runs: Sequence[Run]) -> dict[str, list[str | None]]:
    """The settings that not all runs have alike, each with its value in every run; None where a run lacks it.

    >>> runs = [Run(Path(n), config={"seed": 1, "learning_rate": r}) for n, r in (("a", 0.1), ("b", 0.2))]
    >>> differing(runs)
    {'learning_rate': ['0.1', '0.2']}
    """
    tables = [dict(flat({k: v for k, v in run.config.items() if k not in APART})) for run in runs]
    names = sorted({name for table in tables for name in table})
    values = {name: [table.get(name) for table in tables] for name in names}
    return {name: each for name, each in values.items() if len(set(each)) > 1}


def _page(
    runs: Sequence[Run], rows: Sequence[dict[str, Any]], settings: dict[str, list[str | None]], notes: Sequence[str]
) -> str:
    body = [section("Before and after", _results(rows)), _curves(runs)]
    body.append(section("Settings that differ", _settings(settings, len(runs))))
    if notes:
        items = "".join(f"<li>{escaped(note)}</li>" for note in notes)
        body.append(section("Missing or skipped", f"<ul>{items}</ul>", "notes"))
    names = ", ".join(real(run.directory).name for run in runs)
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f'<meta name="color-scheme" content="light dark">\n<title>{len(runs)} runs · grpo_math report</title>\n'
        f"<style>{part('page.css')}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{len(runs)} runs: {escaped(names)}</h1></header>\n"
    )
    return head + "\n".join(body) + "\n</main>\n</body>\n</html>\n"


def _results(rows: Sequence[dict[str, Any]]) -> str:
    """A row a run; where problems or graders differ, a difference is left out, and the notes say why."""
    head = ("", "run", "steps", "before", "after", "difference", "in the format", "against A", "time")
    body = ""
    for letter, colour, row in zip(ascii_uppercase, cycle(COLOURS), rows, strict=False):
        steps = f"{row['step']}" + (f" of {row['steps']}" if row["steps"] not in (None, row["step"]) else "")
        sides = [_with_interval(row[name]) for name in ("before", "after")]
        formats = [percent(row[name][metrics.ACCURACY_IN_FORMAT]) if row[name] else "–" for name in ("before", "after")]
        cells = [steps, *sides, _points(row["difference"]), " → ".join(formats), _points(row["against_first"])]
        cells.append(duration(row["seconds"]) if row["seconds"] else "–")
        name = f"{escaped(real(row['run_dir']).name)}<br><small>{escaped(row['model'] or '')}</small>"
        mark = f'<strong style="color:var(--{plots.CSS_COLOURS[colour]})">{letter}</strong>'
        body += f"<tr><th scope=row>{mark}</th><th scope=row>{name}</th>"
        body += "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    titles = "".join(f"<th scope=col>{name}</th>" for name in head)
    said = (
        "Accuracy counts a right answer in whatever form, with its 95% interval; differences are in points, paired on "
        "the same problems, with their 95% interval; “against A” is the trained model's from that of run A."
    )
    table = f"<table class=numbers><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class=wide tabindex=0>{table}</div><p><small>{said}</small></p>"


def _with_interval(side: dict[str, Any] | None) -> str:
    if side is None:
        return "–"
    lo, hi = side["ci95"]
    return f"{percent(side[metrics.ACCURACY])}<br><small>{percent(lo)} to {percent(hi)}</small>"


def _points(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    lo, hi = found["ci95"]
    clear = "strong" if lo > 0 or hi < 0 else "span"
    return f"<{clear}>{points(found['difference'])}</{clear}><br><small>{points(lo)} to {points(hi)}</small>"


def _settings(settings: dict[str, list[str | None]], runs: int) -> str:
    if not settings:
        return "<p>All settings that were recorded are the same.</p>"
    head = "".join(f"<th scope=col>{name}</th>" for name in ("setting", *ascii_uppercase[:runs]))
    body = ""
    for name, values in settings.items():
        cells = "".join(f"<td>{'–' if value is None else escaped(value)}</td>" for value in values)
        body += f"<tr><th scope=row>{escaped(name)}</th>{cells}</tr>"
    return f"<div class=wide tabindex=0><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _curves(runs: Sequence[Run]) -> str:
    """A plot for each of `CURVES` that some run has, with a line a run under its letter."""
    drawn = [_with_ends(plots.condensed(run)) for run in runs]
    together = Run(runs[0].directory, history=[row for run in drawn for row in run.history])
    figures = ""
    for title, key in CURVES:
        panel = _panel(title, key, drawn)
        if any(key in row for row in together.history):
            meaning = metrics.METRICS[key].meaning
            svg = plots.inline_svg(plots.render(together, [panel], "svg"))
            figures += f"<figure>{svg}<figcaption>{escaped(meaning)}</figcaption></figure>"
    return section("Training", f"<div class=plots>{figures}</div>") if figures else ""


def _with_ends(run: Run) -> Run:
    """With the evaluations before and after training as its first and its last held-out accuracy."""
    last = run.history[-1][metrics.STEP] if run.history else 0.0
    ends = [
        {metrics.STEP: step, metrics.HELDOUT_ACCURACY: compare.share(results)}
        for step, results in ((0.0, run.before), (last, run.after))
        if results
    ]
    return replace(run, history=[*ends[: bool(run.before)], *run.history, *ends[bool(run.before) :]])


def _panel(title: str, key: str, runs: Sequence[Run]) -> plots.Panel:
    def draw(axes: Any, _: Run, panel: plots.Panel) -> None:
        for letter, colour, run in zip(ascii_uppercase, cycle(COLOURS), runs, strict=False):
            plots.draw_line(axes, run, key, letter, colour)
        if metrics.METRICS[key].unit == "share":
            axes.set_ylim(0, 1.02)

    return plots.Panel(title, ((key, "", plots.BLUE),), draw)
