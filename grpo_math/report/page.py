"""A run -> `report.html` and `plots/*.png`, each written whole or not at all.

The model's output is hostile text. Python escapes whatever it puts into the page; the viewer's rows travel as JSON
without a ``<``, ``>`` or ``&`` in it and reach the page as text nodes alone, formulas among them (math.js); and the
page's content security policy runs no script but its own and loads nothing.

Does not decide what a run did right or wrong: checks/diagnosis.py does.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.checks import Finding
from grpo_math.checks.diagnosis import CHECKS, diagnose
from grpo_math.checks.series import evaluation_line
from grpo_math.evaluation import compare
from grpo_math.evaluation.stats import PairedDifference, mcnemar, wilson
from grpo_math.reading import real
from grpo_math.report.html import escaped, flat, hash_of, part, percent, points, section, write
from grpo_math.report.memory import memory_html
from grpo_math.report.plots import DETAILS, TRAINING, Panel, captions, condensed, inline_svg, render, shows
from grpo_math.report.progress import progress, spent_words
from grpo_math.report.run_dir import Run, mapping, read_run
from grpo_math.report.viewer import CHANGE_NAMES, safe_json, viewer
from grpo_math.run import metrics
from grpo_math.run.metrics import CATEGORIES, IN_FORMAT, RIGHT

CHANGES_SHOWN = 5
CHANGE_SHOWN = 4000  # characters of a completion; the viewer has all of it


class ReportFiles(NamedTuple):
    """What `report` wrote and found. ``notes`` are one line each: what was missing, broken or skipped."""

    html: Path
    plots: list[Path]
    findings: list[Finding]
    notes: list[str]

    def _repr_html_(self) -> str:
        """The page within a notebook, in a frame that is cut off from it."""
        page = escaped(self.html.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" sandbox="allow-scripts" style="width: 100%; height: 50em; border: 0"></iframe>'


def report(run_dir: str | Path, reload: int = 0) -> ReportFiles:
    """Draw ``plots/training.png`` and ``plots/details.png`` and write ``report.html`` into the run directory.

    With ``reload``, the page loads itself anew after so many seconds: for a run that is going.
    """
    run = read_run(run_dir)
    plots, drawn = [], condensed(run)
    for name, panels in (("training", TRAINING), ("details", [panel for panel in DETAILS if shows(drawn, panel)])):
        if run.history and panels:
            path = run.directory / "plots" / f"{name}.png"
            write(path, render(drawn, panels, "png"))
            plots.append(path)
    paired = paired_of(run)
    findings = diagnosis(run, paired)
    page = run.directory / "report.html"
    write(page, build_page(run, drawn, paired, findings, reload).encode("utf-8"))
    return ReportFiles(page, plots, findings, run.notes)


def paired_of(run: Run) -> PairedDifference | None:
    """Before and after; results that cannot be compared become a note."""
    if run.before and run.after:
        try:
            return compare.compare(run.before, run.after)
        except compare.ResultsError as error:
            run.notes.append(f"before.json and after.json are not compared: {error}")
    return None


def diagnosis(run: Run, paired: PairedDifference | None) -> list[Finding]:
    """Findings of the history, with the evaluation before it as step 0 and the one after it as its last line."""
    before, after = (
        results
        and {
            metrics.ACCURACY: compare.share(results),
            metrics.ACCURACY_IN_FORMAT: compare.share(results, IN_FORMAT),
            "n": len(results["rows"]),
        }
        for results in (run.before, run.after if paired else None)
    )
    last = int(run.history[-1][metrics.STEP]) if run.history else 1
    lines = [*evaluation_line(0, before), *run.history, *evaluation_line(last, after)]
    return diagnose(lines, run.config, [path.name for path in run.directory.glob("checkpoint-*")])


def build_page(run: Run, drawn: Run, paired: PairedDifference | None, findings: list[Finding], reload: int = 0) -> str:
    """The page as one text; ``drawn``: the run `condensed`."""
    template, style, maths, own = map(part, ("page.html", "page.css", "math.js", "page.js"))
    script = f'"use strict";\n{maths}\n{own}'
    data = safe_json(viewer(run, paired is not None))  # first: it may add a note
    notes = "".join(f"<li>{escaped(note)}</li>" for note in run.notes)
    parts = {
        "style": style,
        "script": script,
        "script_hash": hash_of(script),
        "name": escaped(real(run.directory).name),
        "reload": f'<meta http-equiv="refresh" content="{reload}">' if reload else "",
        "progress": _progress(run),
        "headline": _headline(run, paired),
        "spent": f"<p>{words}.</p>" if (words := spent_words(run)) else "",
        "facts": _facts(run),
        "findings": _findings(run, findings),
        "notes": section("Missing or skipped", f"<ul>{notes}</ul>", "notes") if run.notes else "",
        "categories": _category_table(run, paired),
        "plots": _figures(drawn),
        "memory": section("Memory", memory) if (memory := memory_html(run)) else "",
        "changes": _changes(run.before, run.after) if run.before and run.after and paired else "",
        "settings": _settings(run),
        "data": data,
    }
    # One pass, so that nothing in a completion is taken for a placeholder.
    return re.sub(r"@@(\w+)@@", lambda found: parts[found[1]], template)


def _progress(run: Run) -> str:
    """How far a run is that has not reached its last step; nothing of one that has."""
    found = progress(run)
    if run.going:
        words = found.words if run.history else "its first step is under way"
        bar = f'<progress max="{found.total}" value="{found.step}"></progress>' if found.total else ""
        return f"<p class=figures>{words[:1].upper()}{words[1:]}</p>{bar}"
    if run.history and not run.after and found.total and found.step < found.total:
        return f"<p><strong>Stopped at step {found.step} of {found.total}.</strong> The same command goes on.</p>"
    return ""


def _headline(run: Run, paired: PairedDifference | None) -> str:
    if run.before and run.after:
        before, after = (percent(compare.share(results)) for results in (run.before, run.after))
        figures = f"{before} <span class=arrow>→</span> {after}"
    elif run.before or run.after:
        when, results = ("before", run.before) if run.before else ("after", run.after)
        assert results is not None
        n = len(results["rows"])
        lo, hi = wilson(compare.count(results, *RIGHT), n)
        words = f"accuracy {when} training, 95% interval {percent(lo)} to {percent(hi)}, n = {n} problems"
        if run.going:
            return f"<p>{percent(compare.share(results))} {words}.</p>"
        return f"<p class=figures>{percent(compare.share(results))}</p><p>{words}</p>"
    else:
        return "" if run.going else "<p>This run holds no evaluation.</p>"
    figures = f"<p class=figures>{figures}</p>"
    if paired is None:
        return f"{figures}<p>held-out accuracy before and after training; not compared, see below</p>"
    p, in_format = mcnemar(paired.gained, paired.lost), compare.compare(run.before, run.after, IN_FORMAT)
    verdict = "The interval holds zero: no clear change." if paired.lo <= 0 <= paired.hi else ""
    return (
        f"{figures}<p class=difference><strong>{points(paired.difference)} points</strong>, 95% paired interval "
        f"{points(paired.lo)} to {points(paired.hi)}. {verdict}</p>"
        f"<p>Held-out accuracy before and after training on the same {paired.n} problems: {paired.gained} went from "
        f"wrong to right and {paired.lost} back (McNemar p {'&lt; 0.0001' if p < 0.0001 else f'= {p:.2g}'}). An answer "
        "counts in whatever form; in the format that the prompt asks for, accuracy went from "
        f"{percent(compare.share(run.before, IN_FORMAT))} to {percent(compare.share(run.after, IN_FORMAT))} "
        f"({points(in_format.difference)} points, {points(in_format.lo)} to {points(in_format.hi)}).</p>"
    )


def _facts(run: Run) -> str:
    results = run.after or run.before or {}
    facts = {
        "model": run.config.get("model_name_or_path") or results.get("model"),
        "evaluation data": results.get("data"),
        "problems": len(results["rows"]) if results else None,
        "template": results.get("template"),
        "evaluation seed": results.get("seed"),
        "training seed": run.config.get("seed"),
        "last step": f"{run.history[-1][metrics.STEP]:.0f}" if run.history else None,
    }
    said = {name: escaped(value) for name, value in facts.items() if value is not None}
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in said.items())


def _findings(run: Run, findings: list[Finding]) -> str:
    if not run.history:
        return ""
    items = "".join(
        f'<li><strong class="{found.level}">{found.level}</strong> {escaped(found.message)}.'
        f"<br>Remedy: {escaped(found.remedy)}</li>"
        for found in findings
    )
    none = f"<p>None of the {len(CHECKS)} checks found anything in these {len(run.history)} steps.</p>"
    return section("Diagnosis", f"<ul>{items}</ul>" if items else none, "findings")


def _category_table(run: Run, paired: PairedDifference | None) -> str:
    several = {name: results for name, results in (("before", run.before), ("after", run.after)) if results}
    if not several:
        return ""
    sides = several.values()
    # A label and, for each results file, (how it reads, the share).
    rows: list[tuple[str, list[tuple[str, float]]]] = []
    for category in compare.categories_of(*sides):
        values = [(compare.count(results, category), compare.share(results, (category,))) for results in sides]
        rows.append((CATEGORIES.get(category, category), [(f"{n} ({percent(part)})", part) for n, part in values]))
    more: dict[str, list[Any]] = {}
    more["accuracy, in whatever form"] = [compare.share(results) for results in sides]
    more["accuracy in format"] = [compare.share(results, IN_FORMAT) for results in sides]
    for name in ("pass@k", "maj@k"):
        for k in mapping(next(iter(sides)).get(name)):
            more[name.replace("@k", f"@{k}")] = [mapping(results.get(name)).get(k) for results in sides]
    for label, shares in more.items():
        if all(isinstance(value, (int, float)) for value in shares):
            rows.append((label, [(percent(value), value) for value in shares]))
    names = ["outcome", *several, *(["change in points"] if paired else [])]
    head = "".join(f"<th scope=col>{name}</th>" for name in names)
    body = ""
    for label, cells in rows:
        texts = [text for text, _ in cells] + ([points(cells[1][1] - cells[0][1])] if paired else [])
        body += f"<tr><th scope=row>{escaped(label)}</th>{''.join(f'<td>{text}</td>' for text in texts)}</tr>"
    table = f"<table class=numbers><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return section("Outcomes", table)


def _figures(drawn: Run) -> str:
    groups = [[panel for panel in panels if shows(drawn, panel)] for panels in (TRAINING, DETAILS)]
    figures = ("".join(_figure(drawn, panel) for panel in panels) for panels in groups)
    first, more = (f"<div class=plots>{figure}</div>" for figure in figures)
    if groups[1]:
        first += f"<details><summary>More plots ({len(groups[1])})</summary>{more}</details>"
    return section("Training", first) if any(groups) else ""


def _figure(drawn: Run, panel: Panel) -> str:
    words = "<br>".join(map(escaped, captions(drawn, panel)))
    return f"<figure>{inline_svg(render(drawn, [panel], 'svg'))}<figcaption>{words}</figcaption></figure>"


def _changes(before: compare.Results, after: compare.Results) -> str:
    parts = []
    for lost, name in ((False, CHANGE_NAMES[0, 1]), (True, CHANGE_NAMES[1, 0])):
        changes = compare.changed(before, after, limit=None, lost=lost)
        parts.append(f"<h3>From {name}: {len(changes)}</h3>")
        parts += [_change(change, opened=not place) for place, change in enumerate(changes[:CHANGES_SHOWN])]
        if len(changes) > CHANGES_SHOWN:
            parts.append(f'<button type=button data-change="{name}">Show all {len(changes)} in the viewer</button>')
    return section("Problems that changed", "".join(parts))


def _change(change: compare.Change, opened: bool) -> str:
    sides = "".join(
        f"<div><h4>{name}</h4><pre class=text dir=auto>{escaped(_beginning(text))}</pre></div>"
        for name, text in (("before", change.before), ("after", change.after))
    )
    problem = f"<span class=text dir=auto>{escaped(_beginning(change.problem))}</span>"
    summary = f"{problem} <small>gold <span class=text>{escaped(_beginning(change.gold))}</span></small>"
    return f"<details{' open' * opened}><summary>{summary}</summary><div class=sides>{sides}</div></details>"


def _beginning(text: str) -> str:
    more = len(text) - CHANGE_SHOWN
    return text if more <= 0 else f"{text[:CHANGE_SHOWN]}\n({more:,} characters more: see the viewer)"


def _settings(run: Run) -> str:
    config = dict(run.config)
    command = config.pop("command", None)
    versions = mapping(config.pop("versions", None)) or mapping((run.after or run.before or {}).get("versions"))
    parts = [f"<h3>Command</h3><pre>{escaped(command)}</pre>"] if isinstance(command, str) else []
    for name, table in (("Versions", versions), ("Settings", config)):
        if table:
            cells = ((escaped(key), escaped(value)) for key, value in flat(table))
            rows = "".join(f"<tr><th scope=row>{key}</th><td>{value}</td></tr>" for key, value in cells)
            parts.append(f"<details><summary>{name} ({len(table)})</summary><table>{rows}</table></details>")
    return section("Configuration", "".join(parts) or "<p>No settings and no versions are recorded.</p>")
