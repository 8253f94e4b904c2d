"""Answer `grpo-math report`: one run, or several.

Does not read a run or draw: run_dir.py, page.py and several.py do.
"""

import sys
from argparse import ArgumentParser, Namespace

from grpo_math.errors import UserError
from grpo_math.run.streams import Answer


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", nargs="+", help="a run, finished or under way; several are compared")
    add("--output", metavar="FILE.html", help="the page on several runs (default: comparison.html next to them)")


def run(args: Namespace) -> Answer:
    """Write the page. Notes go to stderr."""
    if len(args.run_dir) > 1:
        from grpo_math.report.several import report_several

        compared = report_several(args.run_dir, args.output)
        print_notes(compared["notes"])
        return Answer(compared, f"report   {compared['html']}")
    if args.output:
        raise UserError("--output would be ignored with one run: leave it out")
    from grpo_math.report import report

    files = report(args.run_dir[0])
    print_notes(files.notes)
    answer = {
        "html": str(files.html),
        "plots": [str(path) for path in files.plots],
        "findings": [finding._asdict() for finding in files.findings],
    }
    lines = [finding.line() for finding in files.findings]
    return Answer(answer, "\n".join([*lines, f"report   {files.html}"]))


def print_notes(notes: list[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
