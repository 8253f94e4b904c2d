"""`grpo-math select`: write a run's completions as training data for TRL's SFTTrainer."""

import argparse
from pathlib import Path

from grpo_math.report.selected import counted, select
from grpo_math.system.streams import Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="a run with logged completions")
    parser.add_argument("--to", metavar="FILE", required=True, help="the .jsonl file to write")
    parser.add_argument("--all", action="store_true", help="wrong, malformed and cut completions, too")
    parser.add_argument(
        "--per_problem", type=int, default=4, metavar="N", help="at most N completions (4); 0: no limit"
    )
    parser.add_argument("--min_reward", type=float, metavar="R", help="only completions with at least this reward")


def run(args: argparse.Namespace) -> Answer:
    """Select, and print the numbers of completions that were written and left out."""
    filters = {"only_good": not args.all, "per_problem": args.per_problem, "min_reward": args.min_reward}
    rows, left_out = select(Path(args.run_dir), Path(args.to), **filters)
    text = f"selected {rows:,} completions: {args.to}" + f"\nleft out: {counted(left_out)}" * bool(left_out)
    return Answer({"file": args.to, "rows": rows, "left_out": left_out}, text)
