"""Finish a run: the table on the terminal, the report, the model card, the push."""

from pathlib import Path

from grpo_math.evaluation.tables import comparison_table
from grpo_math.report import hub
from grpo_math.report.card import model_card, trained_base
from grpo_math.report.outcome import outcome
from grpo_math.report.page import print_notes, report
from grpo_math.report.run_dir import RunDir, read_run
from grpo_math.run.checkpoints import write_manifest
from grpo_math.run.files import replace_text
from grpo_math.trainer.config import MathGRPOConfig


def finish_run(config: MathGRPOConfig, target: Path, pushes: bool) -> None:
    """Report a run that is complete, and push it to the Hub."""
    run_dir = Path(str(config.output_dir))
    run = read_run(run_dir)
    print_result(run, target)
    kind = "adapter" if (target / "adapter_config.json").exists() else "model"
    replace_text(target / "README.md", model_card(run, run.name, trained_base(run), kind))
    # The manifest contains the size of each file, and the card has changed.
    write_manifest(target)
    # The push is last: if it fails, the run is complete on the disk.
    if pushes:
        pushed = hub.push_finished(run_dir, config.hub_model_id, config.hub_private_repo, config.hub_revision)
        print(f"pushed   {pushed['url']}")


def print_result(run: RunDir, target: Path) -> None:
    """Write the report, and print its result and its warnings."""
    files = report(run.directory)
    if comparison := outcome(run).comparison:
        print(comparison_table(comparison))
    print_notes(files.notes)
    for finding in files.findings:
        if finding.level != "info":
            print(finding.line())
    print(f"report   {files.html}\n{target.name:<8} {target}")
