"""Rows per second of CPU time, ours and Math-Verify's: for docs/grading.md.

    GRPO_MATH_DATA=DATA python tests/benchmarks/grading.py

CPU time is that of this process and of its workers, with the start of the workers. Does not compare verdicts.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

from math_verify import parse, verify

from grpo_math.grading import grade_batch, shutdown
from grpo_math.grading.where import gold_answer

FORMS = Path(__file__).parents[1] / "cases" / "grading_forms.tsv"


def math_verify(golds: Sequence[str], completions: Sequence[str]) -> list[bool]:
    return [verify(parse(f"${gold}$"), parse(text)) for gold, text in zip(golds, completions, strict=True)]


def main() -> None:
    data = Path(os.environ["GRPO_MATH_DATA"])
    solutions = [json.loads(line)["answer"] for line in (data / "gsm8k/test.jsonl").read_text().splitlines()]
    problems = [json.loads(line) for line in (data / "math500/test.jsonl").read_text().splitlines()]
    forms = [line.split("\t")[1:] for line in FORMS.read_text(encoding="utf-8").splitlines()]
    sets = {
        "GSM8K": [(gold_answer(text), text.replace("#### ", "The answer is ")) for text in solutions],
        "MATH-500": [(row["answer"], row["solution"]) for row in problems],
        "forms": [(gold, rf"\boxed{{{answer}}}") for gold, answer in forms],
    }
    for name, rows in sets.items():
        for grader in (grade_batch, math_verify):
            before = [*getrusage(RUSAGE_SELF)[:2], *getrusage(RUSAGE_CHILDREN)[:2]]
            grader(*zip(*rows, strict=True))
            shutdown()  # the time of a worker counts when the worker has ended
            seconds = sum((*getrusage(RUSAGE_SELF)[:2], *getrusage(RUSAGE_CHILDREN)[:2])) - sum(before)
            print(f"{name:10} {grader.__name__:12} {len(rows) / seconds:8,.0f} rows per CPU second")


if __name__ == "__main__":
    main()
