"""`grpo-math report`: write the report page and plots of a run, or compare several runs."""

from argparse import ArgumentParser, Namespace

from grpo_math.errors import UserError
from grpo_math.evaluation.probe_results import Seeds
from grpo_math.evaluation.tables import points
from grpo_math.report.page import print_notes, report, report_several
from grpo_math.system.streams import Answer


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", nargs="+", help="a run, finished or under way; several are compared")
    add("--output", metavar="FILE.html", help="the page on several runs (default: comparison.html next to them)")


def run(args: Namespace) -> Answer:
    """Write the page. Notes go to stderr."""
    if len(args.run_dir) > 1:
        compared = report_several(args.run_dir, args.output)
        print_notes(compared["notes"])
        seeds = Seeds(**compared["seeds"]) if compared["seeds"] else None
        lines = [f"seeds    {points(seeds)} over {seeds.n} seeds"] if seeds else []
        lines.append(f"report   {compared['html']}")
        return Answer(compared, "\n".join(lines))
    if args.output:
        raise UserError("--output would be ignored with one run: leave it out")
    files = report(args.run_dir[0])
    print_notes(files.notes)
    answer = {
        "html": str(files.html),
        "plots": [str(path) for path in files.plots],
        "findings": [finding._asdict() for finding in files.findings],
    }
    lines = [finding.line() for finding in files.findings]
    return Answer(answer, "\n".join([*lines, f"report   {files.html}"]))
