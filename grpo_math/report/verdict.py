"""The end of a finished run: the table on the terminal, the report, the push.

Does not evaluate anything.
"""

from pathlib import Path

from grpo_math.evaluation.compare import ResultsError, changed, compare, read_results, share
from grpo_math.report import hub
from grpo_math.report.page import ReportFiles, report
from grpo_math.report.terminal import terminal_changes, terminal_table
from grpo_math.trainer.config import MathGRPOConfig


def conclude(config: MathGRPOConfig, target: Path, pushes: bool) -> None:
    """Report a run that is whole, and push it to the Hub."""
    run_dir = Path(str(config.output_dir))
    print_verdict(run_dir, target)
    if pushes:
        pushed = hub.push_finished(run_dir, config.hub_model_id, config.hub_private_repo, config.hub_revision)
        print(f"pushed   {pushed['url']}")


def print_verdict(run_dir: Path, target: Path) -> ReportFiles:
    """Write the report, and print its result and its warnings."""
    files = report(run_dir)
    if (run_dir / "before.json").exists() and (run_dir / "after.json").exists():
        before, after = read_results(run_dir / "before.json"), read_results(run_dir / "after.json")
        try:
            print(terminal_table(before, after, compare(before, after)))
            print(terminal_changes(changed(before, after)))
        except ResultsError as error:  # the run was resumed with another grader
            print(f"accuracy {share(before):.1%} before, {share(after):.1%} after; not compared: {error}")
    for finding in files.findings:
        if finding.level != "info":
            print(finding.line())
    print(f"report   {files.html}\n{target.name:<8} {target}")
    return files
