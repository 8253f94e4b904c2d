"""Ours and Math-Verify's: rows per second of CPU time, or the mistakes in files with labels. For docs/grading.md.

    GRPO_MATH_DATA=DATA python tests/benchmarks/grading.py
    python tests/benchmarks/grading.py tests/cases/grading_pairs*.jsonl

CPU time is that of this process and of its workers, with the start of the workers. A row of a file has ``gold``,
``prediction`` and ``equivalent`` (true or false); a row may have a ``source``, which gets its own line.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

from math_verify import parse, verify

from grpo_math.grading import GRADER, Verdict, grade_batch, shutdown
from grpo_math.grading.where import gold_answer

FORMS = Path(__file__).parents[1] / "cases" / "grading_forms.tsv"


def math_verify(golds: Sequence[str], completions: Sequence[str]) -> list[bool]:
    return [verify(parse(f"${gold}$"), parse(text)) for gold, text in zip(golds, completions, strict=True)]


def mistakes(paths: Sequence[str]) -> None:
    """Print a table of the wrong answers that are paid and the right ones that are not, by source."""
    sources = defaultdict(list)
    for path in map(Path, paths):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            sources[row.get("source", path.name)].append((row["gold"], row["prediction"], row["equivalent"]))
    print(f"{date.today()}: grader {GRADER}, Math-Verify {version('math-verify')}\n")
    print("| source | pairs | wrong paid | right unpaid | Math-Verify: wrong paid | right unpaid |")
    print("|---|---|---|---|---|---|")
    for source, rows in sources.items():
        golds, predictions, labels = zip(*rows, strict=True)
        ours = [grade.verdict is Verdict.CORRECT for grade in grade_batch(golds, predictions)]
        counts = [
            sum(label is right and label is not paid for label, paid in zip(labels, verdicts, strict=True))
            for verdicts in (ours, math_verify(golds, predictions))
            for right in (False, True)
        ]
        print("|", " | ".join(map(str, (source, len(rows), *counts))), "|")
    shutdown()


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
    mistakes(sys.argv[1:]) if sys.argv[1:] else main()
