"""Answer `grpo-math select`: write a run's completions as training data for TRL's SFTTrainer."""

import argparse
import json
from pathlib import Path

from grpo_math.errors import ConfigError
from grpo_math.grading import Verdict
from grpo_math.reading import near, read_table
from grpo_math.report.run_dir import completion_files
from grpo_math.run.streams import Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="a run with logged completions")
    parser.add_argument("--right", action="store_true", help="only completions with a correct answer")
    parser.add_argument("--to", metavar="FILE", required=True, help="the .jsonl file to write")


def run(args: argparse.Namespace) -> Answer:
    """Write each different completion once, as a row with prompt and completion."""
    file = Path(args.to)
    if file.exists():
        raise ConfigError("to", args.to, "exists", "name a new file")
    selected = (
        {name: row[name] for name in ("prompt", "completion")}
        for path in completion_files(Path(args.run_dir))
        for _, row in read_table(path)
        if not args.right or row.get("verdict") == Verdict.CORRECT
    )
    # A dict is a set that keeps the order.
    lines = dict.fromkeys(json.dumps(row, ensure_ascii=False) for row in selected)
    if not lines:
        reason = f"has no {'correct ' if args.right else ''}completions"
        logged = "train with log_completions, on data with gold answers"
        raise ConfigError("run_dir", args.run_dir, reason, near(args.run_dir) or logged)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Answer({"file": args.to, "rows": len(lines)}, f"selected {len(lines):,} completions: {args.to}")
