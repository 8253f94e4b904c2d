"""Write `report.html` and `plots/*.png` of a run.

The model's output is hostile text: page.html escapes all text (render.py), and the page's content security policy runs
no script except its own and loads nothing.

checks/diagnosis.py has the findings.
"""

import sys
from datetime import datetime
from html import escape
from pathlib import Path
from typing import NamedTuple

from grpo_math.checks.diagnosis import CHECKS
from grpo_math.errors import Finding
from grpo_math.report import viewer
from grpo_math.report.outcome import outcome
from grpo_math.report.plots import FIRST, PLOTS, curves, png, svg
from grpo_math.report.progress import duration, progress, spent
from grpo_math.report.render import flat, page
from grpo_math.report.run_dir import RunDir, read_run
from grpo_math.run import metrics
from grpo_math.run.earlier import REPORT, archive, in_the_way
from grpo_math.run.files import replace_text, writing

CHANGES_SHOWN = 5
NO_SETTINGS = ("command", "versions", "hardware", "stated")  # entries of config.yaml that are not settings


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


def report(run_dir: str | Path) -> ReportFiles:
    """Draw ``plots/training.png`` and ``plots/details.png`` and write ``report.html`` into the run directory."""
    run = read_run(run_dir)
    of_run = outcome(run)
    drawn = (
        [(plot, lines) for plot in PLOTS if (lines := curves(run.history, plot, of_run.ends))] if run.history else []
    )
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
