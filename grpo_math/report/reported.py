"""Answer `grpo-math report`: one run, one that is under way, or several.

Does not read a run or draw: run_dir.py, page.py, watch.py and several.py do.
"""

import sys
from argparse import ArgumentParser, Namespace

from grpo_math.errors import ConfigError, UserError
from grpo_math.run.streams import Answer


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", nargs="+", help="a run; several are compared")
    watched = "write the page every 30 seconds, or as given, until the run ends"
    add("--watch", nargs="?", type=int, const=30, metavar="SECONDS", help=watched)
    add("--output", metavar="FILE.html", help="of several runs (default: comparison.html next to them)")


def run(args: Namespace) -> Answer:
    """Write the page that the options ask for. Notes go to stderr."""
    if len(args.run_dir) > 1:
        if args.watch is not None:
            raise UserError("--watch would be ignored with several runs: leave it out")
        from grpo_math.report.several import report_several

        compared = report_several(args.run_dir, args.output)
        print_notes(compared.notes)
        return Answer({**compared._asdict(), "html": str(compared.html)}, f"report   {compared.html}")
    if args.output:
        raise UserError("--output would be ignored with one run: leave it out")
    if args.watch is None:
        from grpo_math.report import report

        files = report(args.run_dir[0])
    elif args.watch < 1:
        raise ConfigError("watch", args.watch, "is not a number of seconds", "give 1 or more")
    else:
        from grpo_math.report.watch import watch

        files = watch(args.run_dir[0], args.watch)
    print_notes(files.notes)
    findings = [finding._asdict() for finding in files.findings]
    lines = [finding.line() for finding in files.findings]
    answer = {"html": str(files.html), "plots": [str(path) for path in files.plots], "findings": findings}
    return Answer(answer, "\n".join([*lines, f"report   {files.html}"]))


def print_notes(notes: list[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
