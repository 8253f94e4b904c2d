"""A run -> `report.html` and `plots/*.png`, each written whole or not at all.

The model's output is hostile text: page.html escapes whatever it prints (render.py), formulas are MathML of known
elements (formulas.py), and the page's content security policy runs no script but its own and loads nothing.

Does not decide what a run did right or wrong: checks/diagnosis.py does.
"""

from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.checks import Finding
from grpo_math.checks.diagnosis import CHECKS, diagnose
from grpo_math.checks.series import evaluation_line
from grpo_math.evaluation import compare
from grpo_math.evaluation.stats import PairedDifference, mcnemar, wilson
from grpo_math.report import viewer
from grpo_math.report.plots import DETAILS, TRAINING, captions, condensed, inline_svg, render, shows
from grpo_math.report.progress import progress, spent_words
from grpo_math.report.render import flat, page, write
from grpo_math.report.run_dir import Run, read_run
from grpo_math.run import metrics
from grpo_math.run.metrics import CATEGORIES, IN_FORMAT, RIGHT

CHANGES_SHOWN = 5
FACTS_OF_CONFIG = {"model": "model_name_or_path", "training seed": "seed"}
FACTS_OF_RESULTS = {"model": "model", "evaluation data": "data", "template": "template", "evaluation seed": "seed"}


class ReportFiles(NamedTuple):
    """What `report` wrote and found. ``notes`` are one line each: what is missing, cannot be read or is left out."""

    html: Path
    plots: list[Path]
    findings: list[Finding]
    notes: list[str]

    def _repr_html_(self) -> str:
        """The page within a notebook, in a frame that is cut off from it."""
        text = escape(self.html.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{text}" sandbox="allow-scripts" style="width: 100%; height: 50em; border: 0"></iframe>'


def report(run_dir: str | Path, reload: int = 0) -> ReportFiles:
    """Draw ``plots/training.png`` and ``plots/details.png`` and write ``report.html`` into the run directory.

    With ``reload``, the page loads itself again after that many seconds: for a run that is going.
    """
    run = read_run(run_dir)
    drawn, plots, figures = condensed(run), [], {}
    for name, known in {"training": TRAINING, "details": DETAILS}.items():
        if panels := [panel for panel in known if shows(drawn, panel)]:
            write(run.directory / "plots" / f"{name}.png", render(drawn, panels, "png"))
            plots.append(run.directory / "plots" / f"{name}.png")
            figures[name] = [(inline_svg(render(drawn, [panel], "svg")), captions(drawn, panel)) for panel in panels]
    paired = paired_of(run)
    findings = diagnosis(run, paired)
    values = {**_evaluated(run, paired), **_configured(run), "figures": figures, "findings": findings}
    values |= {"checks": len(CHECKS), "reload": reload, "run": run}
    values |= {"progress": progress(run), "spent": spent_words(run)}
    target = run.directory / "report.html"
    write(target, page(title=Path(run.directory).resolve().name, **values).encode("utf-8"))
    return ReportFiles(target, plots, findings, run.notes)


def paired_of(run: Run) -> PairedDifference | None:
    """Return the paired difference between before and after. Results that cannot be compared become a note."""
    if run.before and run.after:
        try:
            return compare.compare(run.before, run.after)
        except compare.ResultsError as error:
            run.notes.append(f"before.json and after.json are not compared: {error}")
    return None


def diagnosis(run: Run, paired: PairedDifference | None) -> list[Finding]:
    """Return the findings of the history, with the evaluations before and after it as its first and last lines."""
    # Only one of two that cannot be compared takes part.
    before, after = (run.before, run.after) if paired else (None if run.after else run.before, None)
    last = int(run.history[-1][metrics.STEP]) if run.history else 1
    lines = [*evaluation_line(0, side(before)), *run.history, *evaluation_line(last, side(after))]
    return diagnose(lines, run.config, [path.name for path in run.directory.glob("checkpoint-*")])


def side(results: compare.Results | None) -> dict[str, Any] | None:
    """Return the accuracy of one evaluation, in the format too, with its interval and the number of answers."""
    if not results:
        return None
    n = len(results["rows"])
    shares = {metrics.ACCURACY: compare.share(results), metrics.ACCURACY_IN_FORMAT: compare.share(results, IN_FORMAT)}
    return {**shares, "ci95": results.get("ci95") or list(wilson(compare.count(results, *RIGHT), n)), "n": n}


def _evaluated(run: Run, paired: PairedDifference | None) -> dict[str, Any]:
    """Return the values of the page that are of the evaluations, and of completions."""
    sides = {name: results for name, results in (("before", run.before), ("after", run.after)) if results}
    values: dict[str, Any] = {"sides": {name: side(results) for name, results in sides.items()}, "paired": paired}
    values |= {"outcomes": _outcomes(list(sides.values())), "sources": viewer.sources(run, paired is not None)}
    if run.before and run.after and paired:
        gained, lost = (compare.changed(run.before, run.after, limit=None, lost=lost) for lost in (False, True))
        values["changes"] = {viewer.CHANGES[0, 1]: gained, viewer.CHANGES[1, 0]: lost}
        values |= {"in_format": compare.compare(run.before, run.after, IN_FORMAT), "shown": CHANGES_SHOWN}
        values["p"] = mcnemar(paired.gained, paired.lost)
    return values


def _outcomes(sides: list[compare.Results]) -> list[tuple[str, list[int] | None, list[float]]]:
    """Return a row for each category and total: its label, the count of each evaluation if it is one, and the share."""
    rows: list[tuple[str, list[int] | None, list[float]]] = []
    for category in compare.categories_of(*sides) if sides else ():
        counts = [compare.count(results, category) for results in sides]
        shares = [compare.share(results, (category,)) for results in sides]
        rows.append((CATEGORIES.get(category, category), counts, shares))
    totals = {"accuracy, in whatever form": RIGHT, "accuracy in format": IN_FORMAT} if sides else {}
    rows += [(label, None, [compare.share(results, right) for results in sides]) for label, right in totals.items()]
    for name in ("pass@", "maj@"):
        tables = [results.get(f"{name}k") or {} for results in sides]
        for k in [k for k in tables[0] if all(k in table for table in tables)] if tables else ():
            rows.append((f"{name}{k}", None, [table[k] for table in tables]))
    return rows


def _configured(run: Run) -> dict[str, Any]:
    """Return the values of the page that are of the settings."""
    results = run.after or run.before or {}
    known = {name: results.get(key) for name, key in FACTS_OF_RESULTS.items()}
    known |= {name: run.config[key] for name, key in FACTS_OF_CONFIG.items() if run.config.get(key) is not None}
    known |= {"problems": len(results["rows"])} if results else {}
    known |= {"last step": int(run.history[-1][metrics.STEP])} if run.history else {}
    settings = {name: value for name, value in run.config.items() if name not in ("command", "versions")}
    versions = run.config.get("versions") or results.get("versions") or {}
    tables = {"Versions": dict(flat(versions)), "Settings": dict(flat(settings))}
    facts = {name: value for name, value in known.items() if value is not None}
    return {"facts": facts, "command": run.config.get("command"), "tables": tables}
