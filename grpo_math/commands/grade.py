"""`grpo-math grade`: the verdicts of a file of answers."""

import argparse
import json
from contextlib import ExitStack, suppress
from typing import Any

from grpo_math.errors import UserError
from grpo_math.grading.file import grade_file
from grpo_math.grading.verdict import GradingPolicy
from grpo_math.system.streams import Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", help="one JSON object per line, with gold and prediction")
    add("--jsonl", action="store_true", help="print one JSON object for each row: verdict, answer, seconds")
    add("--format", help="the requested answer format (default: any)")
    add("--timeout", type=float, default=5.0, help="seconds of CPU time for one answer (default: 5)")
    add("--no_percent_as_number", action="store_true", help="25%% equals 0.25 and not 25")
    add("--rounded_golds", action="store_true", help="a gold answer such as 85.71 accepts 600/7, which rounds to it")
    add(
        "--digits",
        type=int,
        default=12,
        metavar="N",
        help="a decimal with this many significant digits may equal an exact number (default: 12; 0: never)",
    )


def run(args: argparse.Namespace) -> Answer | int:
    """Grade the file and count its verdicts, or print a line for each row."""
    if args.json and args.jsonl:
        raise UserError("--json would be ignored by --jsonl: leave it out")
    options: dict[str, Any] = {
        "answer_format": args.format,
        "timeout": args.timeout,
        "policy": GradingPolicy(not args.no_percent_as_number, args.digits, args.rounded_golds),
    }
    with ExitStack() as stack:
        with suppress(ImportError):  # without tqdm there is no progress bar
            from tqdm import tqdm

            bar = stack.enter_context(tqdm(desc="grading", unit="answer", delay=2))
            options["progress"] = lambda n: bar.update(n) and None
        graded = grade_file(args.file, **options)
    if args.jsonl:
        for result in graded["results"]:
            print(json.dumps(result))
        return 0
    counts = "  ".join(f"{verdict} {count}" for verdict, count in graded["verdicts"].items() if count)
    return Answer(graded, f"{graded['rows']} rows: {counts}")
