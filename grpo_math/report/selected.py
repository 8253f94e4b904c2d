"""Answer `grpo-math select`: write a run's completions as training data for TRL's SFTTrainer."""

import argparse
import json
from pathlib import Path

from grpo_math.errors import ConfigError
from grpo_math.grading import Verdict
from grpo_math.reading import reading
from grpo_math.report.run_dir import completion_files
from grpo_math.run.streams import Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="a run with logged completions")
    parser.add_argument("--right", action="store_true", help="only completions with a correct answer")
    parser.add_argument("--to", metavar="FILE", required=True, help="the .jsonl file to write")


def run(args: argparse.Namespace) -> Answer:
    """Write each different completion once, as a row with prompt and completion."""
    from pyarrow.parquet import read_table

    file = Path(args.to)
    if file.exists():
        raise ConfigError("to", args.to, "exists", "name a new file")
    lines: dict[str, None] = {}  # a set that keeps the order
    for path in completion_files(Path(args.run_dir)):
        with reading(path):
            for row in read_table(path).to_pylist():
                if not args.right or row.get("verdict") == Verdict.CORRECT:
                    selected = {name: row[name] for name in ("prompt", "completion")}
                    lines[json.dumps(selected, ensure_ascii=False)] = None
    if not lines:
        reason = f"has no {'correct ' if args.right else ''}completions"
        raise ConfigError("run_dir", args.run_dir, reason, "train with log_completions, on data with gold answers")
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Answer({"file": args.to, "rows": len(lines)}, f"selected {len(lines):,} completions: {args.to}")
