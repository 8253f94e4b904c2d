"""What `grpo-math report` answers, as JSON and as text: of one run, of one that is going, of several.

Does not read a run or draw: run_dir.py, page.py, watch.py and several.py do.
"""

import sys
from argparse import ArgumentParser, Namespace

from grpo_math.errors import ConfigError, UserError
from grpo_math.run.streams import Answer

IGNORED_BY = {"watch": "with several runs", "every": "without --watch", "output": "with one run"}


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", nargs="+", help="a run; several are compared")
    add("--watch", action="store_true", help="draw it anew until the run has ended; the page reloads itself")
    add("--every", type=int, metavar="SECONDS", help="how often --watch draws it (default: 30)")
    add("--output", metavar="FILE.html", help="of several runs (default: comparison.html next to them)")


def run(asked: Namespace) -> Answer:
    """Draw what the options ask for. Notes go to stderr."""
    several = len(asked.run_dir) > 1
    for name, ignored in (("watch", several), ("every", not asked.watch), ("output", not several)):
        if ignored and getattr(asked, name) not in (None, False):
            raise UserError(f"--{name} would be ignored {IGNORED_BY[name]}: leave it out")
    if asked.every is not None and asked.every < 1:
        raise ConfigError("every", asked.every, "is not a number of seconds", "give 1 or more")
    if several:
        from grpo_math.report.several import report_several

        found = report_several(asked.run_dir, asked.output)
        _print_notes(found.notes)
        return Answer({**found._asdict(), "html": str(found.html)}, f"report   {found.html}")
    if asked.watch:
        from grpo_math.report.watch import watch

        files = watch(asked.run_dir[0], asked.every or 30, lambda line: print(line, file=sys.stderr))
    else:
        from grpo_math.report import report

        files = report(asked.run_dir[0])
    findings = [finding._asdict() for finding in files.findings]
    told = {"html": str(files.html), "plots": [str(plot) for plot in files.plots], "findings": findings}
    _print_notes(files.notes)
    return Answer(told, "\n".join([*(finding.line() for finding in files.findings), f"report   {files.html}"]))


def _print_notes(notes: list[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
