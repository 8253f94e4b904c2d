"""What a finished run comes to: the table on the terminal, the report, the trackers' last word, the push.

Does not evaluate anything.
"""

from pathlib import Path

from grpo_math.evaluation.compare import changed, compare, read_results
from grpo_math.report import hub
from grpo_math.report.page import ReportFiles, report
from grpo_math.report.terminal import terminal_changes, terminal_table
from grpo_math.report.trackers import Trackers
from grpo_math.trainer.config import MathGRPOConfig


def conclude(config: MathGRPOConfig, target: Path, pushes: bool, told: Trackers | None = None) -> None:
    """The report of a run that is whole, also for its trackers, and its push to the Hub."""
    run_dir = Path(str(config.output_dir))
    files = print_verdict(run_dir, target)
    if told is not None:
        told.end(files.plots, files.findings)
    if pushes:
        pushed = hub.push_finished(run_dir, config.hub_model_id, config.hub_private_repo, config.hub_revision)
        print(f"pushed   {pushed['url']}")


def print_verdict(run_dir: Path, target: Path) -> ReportFiles:
    """The report, and on the terminal what it comes to."""
    files = report(run_dir)
    if (run_dir / "before.json").exists() and (run_dir / "after.json").exists():
        before, after = read_results(run_dir / "before.json"), read_results(run_dir / "after.json")
        print(terminal_table(before, after, compare(before, after)))
        print(terminal_changes(changed(before, after)))
    for finding in files.findings:
        if finding.level != "info":
            print(finding.line())
    print(f"report   {files.html}\n{target.name:<8} {target}")
    return files
