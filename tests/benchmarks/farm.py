"""How often a wrong answer is paid and a right one is not, by kind of rewriting: ours and Math-Verify's.

    GRPO_MATH_DATA=DATA python tests/benchmarks/farm.py [--golds 300] [--seed 0] [--misses FILE] [--ours]

Takes golds of GSM8K and MATH by seed and rewrites each in ways that keep its value and in ways that do not
(tests/rewrites).
A right one is unpaid whatever kept it from being paid. Math-Verify grades the same rows with its defaults in a process
of its own, which is killed and replaced after 20 seconds over one row; such a row is unpaid.

Does not test anything: tests/grading/test_farm.py does.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rewrites import Rewritten, drawn, rewritings

from grpo_math.evaluation.stats import wilson
from grpo_math.grading import grade_batch, shutdown

LIMIT = 20.0  # seconds for a row; Math-Verify's own limit is 5 for the parsing of each side and for the comparison
THEIRS = """
import json, sys
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
config = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
answers = sys.stdout
sys.stdout = sys.stderr
for line in sys.stdin:
    gold, prediction = json.loads(line)
    try:
        paid = verify(parse(f"${gold}$", config), parse(prediction, config))
    except Exception:
        paid = False
    print(int(paid), file=answers, flush=True)
"""


def theirs(rows: list[Rewritten]) -> Iterator[bool]:
    """Does Math-Verify pay each row? One process, a new one after each row that overran."""
    process = None
    for row in rows:
        if process is None:
            process = subprocess.Popen(
                [sys.executable, "-c", THEIRS],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1,
            )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([row.gold, row.prediction]) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], LIMIT)
        answer = process.stdout.readline() if ready else ""
        if not answer:
            process.kill()
            process.wait()
            process = None
        yield answer.strip() == "1"
    if process is not None:
        process.kill()
        process.wait()


def rate(paid: list[bool], equivalent: bool) -> str:
    """The share that has the wrong outcome, with its interval."""
    wrong = sum(flag != equivalent for flag in paid)
    lo, hi = wilson(wrong, len(paid))
    return f"{wrong:6d} {wrong / len(paid):7.2%} [{lo:6.2%}, {hi:6.2%}]"


def table(rows: list[Rewritten], said: dict[str, list[bool]]) -> None:
    for equivalent, title in ((False, "wrong answers that are paid"), (True, "right answers that are not paid")):
        chosen = [i for i, row in enumerate(rows) if row.equivalent is equivalent]
        print(f"\n{title:32s}{'n':>6}" + "".join(f"{who:>33s}" for who in said))
        for kind in ["all", *sorted({rows[i].kind for i in chosen})]:
            mine = [i for i in chosen if kind in ("all", rows[i].kind)]
            print(
                f"  {kind:30s}{len(mine):6d}"
                + "".join(f"  {rate([p[i] for i in mine], equivalent)}" for p in said.values())
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--golds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--misses", type=Path, help="write our wrong paid and right unpaid rows there, one JSON a line")
    parser.add_argument("--ours", action="store_true", help="leave Math-Verify out, which takes minutes")
    options = parser.parse_args()
    golds = drawn(Path(os.environ["GRPO_MATH_DATA"]), options.golds, options.seed)
    rows = [row for gold in golds for row in rewritings(gold, options.seed)]
    grades = grade_batch([row.gold for row in rows], [row.prediction for row in rows])
    shutdown()
    said = {"grpo_math": [str(grade.verdict) == "correct" for grade in grades]}
    if not options.ours:
        said["Math-Verify"] = list(theirs(rows))
    print(f"{len(golds)} golds, {len(rows)} rewritings, seed {options.seed}")
    table(rows, said)
    if options.misses is not None:
        missed = [
            {**row._asdict(), "verdict": str(grade.verdict), "answer": grade.answer, "reason": grade.reason}
            for row, grade, paid in zip(rows, grades, said["grpo_math"], strict=True)
            if paid != row.equivalent
        ]
        missed.sort(key=lambda miss: (miss["equivalent"], miss["kind"]))
        options.misses.write_text("".join(json.dumps(miss) + "\n" for miss in missed), encoding="utf-8")


if __name__ == "__main__":
    main()
