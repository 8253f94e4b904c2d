"""`grpo-math report`: write the report page and plots of a run, or compare several runs."""

from argparse import ArgumentParser, Namespace

from grpo_math.report.page import print_notes, report
from grpo_math.report.several import compare_runs
from grpo_math.system.streams import Answer


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run_dir", nargs="+", help="a run, finished or under way; several are compared")


def run(args: Namespace) -> Answer:
    """Write the page of a run, or compare several runs. Notes go to stderr."""
    if len(args.run_dir) > 1:
        compared, table = compare_runs(args.run_dir)
        print_notes(compared["notes"])
        return Answer(compared, table)
    files = report(args.run_dir[0])
    print_notes(files.notes)
    answer = {
        "html": str(files.html),
        "plots": [str(path) for path in files.plots],
        "findings": [finding._asdict() for finding in files.findings],
    }
    lines = [finding.line() for finding in files.findings]
    return Answer(answer, "\n".join([*lines, f"report   {files.html}"]))
