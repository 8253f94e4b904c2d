"""`grpo-math select`: write a run's completions as training data for TRL's SFTTrainer."""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.grading import Verdict
from grpo_math.report.run_dir import completion_files
from grpo_math.system.reading import near, read_table
from grpo_math.system.streams import Answer

COLUMNS = ("prompt", "completion")  # the columns that TRL's SFTTrainer reads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="a run with logged completions")
    parser.add_argument("--to", metavar="FILE", required=True, help="the .jsonl file to write")
    parser.add_argument("--all", action="store_true", help="wrong, malformed and cut completions, too")
    parser.add_argument(
        "--per_problem", type=int, default=4, metavar="N", help="at most N completions (4); 0: no limit"
    )
    parser.add_argument("--min_reward", type=float, metavar="R", help="only completions with at least this reward")


def run(args: argparse.Namespace) -> Answer:
    """Write each distinct completion that passes the filters, as a row with prompt and completion."""
    file, run_dir = Path(args.to), Path(args.run_dir)
    if file.exists():
        raise ConfigError("to", args.to, "exists", "name a new file")
    if not run_dir.is_dir():
        raise ConfigError("run_dir", args.run_dir, "is not a folder", near(run_dir) or "name the folder of a run")
    lines: dict[str, None] = {}  # a dict is a set that keeps the order
    left_out, per_problem = Counter[str](), Counter[str]()
    for row in (row for path in completion_files(run_dir) for _, row in read_table(path)):
        line, problem = (json.dumps({n: row[n] for n in names}, ensure_ascii=False) for names in (COLUMNS, COLUMNS[:1]))
        reason = _rejection(row, args) or "repeated" * (line in lines)
        if not reason and not args.all and 0 < args.per_problem <= per_problem[problem]:
            reason = f"more than {args.per_problem} of a problem"
        if reason:
            left_out[reason] += 1
        else:
            lines[line] = None
            per_problem[problem] += 1
    counts = "; ".join(f"{count:,} {reason}" for reason, count in left_out.most_common())
    if not lines:
        reason = f"has no completions to select ({counts})" if counts else "has no completions"
        remedy = "write all of them with --all" if counts else "train with log_completions, on data with gold answers"
        raise ConfigError("run_dir", args.run_dir, reason, remedy)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = f"selected {len(lines):,} completions: {args.to}" + f"\nleft out: {counts}" * bool(counts)
    return Answer({"file": args.to, "rows": len(lines), "left_out": dict(left_out)}, text)


def _rejection(row: dict[str, Any], args: argparse.Namespace) -> str:
    """Return the reason to leave a completion out, or ""."""
    reward = row.get("reward")
    reasons = {
        "not correct": row.get("verdict") != Verdict.CORRECT and not args.all,
        # A run without a format has True or None.
        "outside the format": row.get("in_format") is False and not args.all,
        "cut at the limit": bool(row.get("truncated")) and not args.all,
        f"below the reward {args.min_reward}": args.min_reward is not None
        and not (reward is not None and reward >= args.min_reward),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
