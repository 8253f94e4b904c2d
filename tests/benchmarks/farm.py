"""Print how often a wrong answer is paid and a right one is not, by kind of rewriting: ours and Math-Verify's.

    python tests/benchmarks/farm.py [--pairs FILE] [--misses] [--ours]

The pairs are gold answers of GSM8K and MATH, rewritten in ways that keep the value and in ways that do not. Math-Verify
grades them with its defaults. Rates have Wilson intervals of 95%.

Does not test anything: tests/grading/test_labelled.py does.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from grpo_math.evaluation.stats import wilson
from grpo_math.grading import grade_batch, shutdown

PAIRS = Path(__file__).parents[1] / "cases" / "grading_pairs_rewritten.jsonl"


def math_verify(rows: list[dict[str, Any]]) -> list[bool]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return [verify(parse(f"${row['gold']}$", config), parse(row["prediction"], config)) for row in rows]


def ours(rows: list[dict[str, Any]]) -> list[bool]:
    grades = grade_batch([row["gold"] for row in rows], [row["prediction"] for row in rows])
    shutdown()
    return [grade.verdict == "correct" for grade in grades]


def rate(paid: list[bool], equivalent: bool) -> str:
    """Return the share with the wrong outcome, and its interval."""
    wrong = sum(flag != equivalent for flag in paid)
    low, high = wilson(wrong, len(paid))
    return f"{wrong:6d} {wrong / len(paid):7.2%} [{low:6.2%}, {high:6.2%}]"


def table(rows: list[dict[str, Any]], graders: dict[str, list[bool]]) -> None:
    for equivalent, title in ((False, "wrong answers that are paid"), (True, "right answers that are not paid")):
        chosen = [i for i, row in enumerate(rows) if row["equivalent"] is equivalent]
        print(f"\n{title:32s}{'n':>6}" + "".join(f"{name:>33s}" for name in graders))
        for kind in ["all", *sorted({rows[i]["kind"] for i in chosen})]:
            of_kind = [i for i in chosen if kind in ("all", rows[i]["kind"])]
            rates = "".join(f"  {rate([paid[i] for i in of_kind], equivalent)}" for paid in graders.values())
            print(f"  {kind:30s}{len(of_kind):6d}{rates}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=Path, default=PAIRS)
    parser.add_argument("--misses", action="store_true", help="print our wrong outcomes, one JSON a line")
    parser.add_argument("--ours", action="store_true", help="leave Math-Verify out, which takes minutes")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.pairs.read_text(encoding="utf-8").splitlines()]
    graders = {"grpo_math": ours(rows)}
    if not options.ours:
        graders["Math-Verify"] = math_verify(rows)
    table(rows, graders)
    if options.misses:
        for row, paid in zip(rows, graders["grpo_math"], strict=True):
            if paid != row["equivalent"]:
                print(json.dumps(row))


if __name__ == "__main__":
    main()
