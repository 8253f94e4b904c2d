r"""Worked solutions without a marker, as base models write them: how many right ones are paid, ours and Math-Verify's.

    GRPO_MATH_DATA=DATA python tests/benchmarks/unmarked.py [--rows 1319]

The solutions of GSM8K's test set without their `####` line, with their calculator marks (`<<3+4=7>>`) and without, and
those of MATH-500 without their `\boxed{}`. Each is graded against its own gold and against the next row's, where that
is another; the second should not be paid. Rates with Wilson intervals of 95%. Math-Verify gets the text as it stands,
with its extraction of LaTeX and of plain numbers.

Does not test anything: tests/grading does.
"""

import argparse
import json
import os
import re
from itertools import pairwise
from pathlib import Path

from grpo_math.evaluation.stats import wilson
from grpo_math.grading import grade_batch, shutdown, where

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
Texts = list[tuple[str, str]]  # gold, completion


def read(name: str, rows: int) -> list[dict[str, str]]:
    path = Path(os.environ["GRPO_MATH_DATA"]) / name
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][:rows]


def unmarked(rows: int) -> dict[str, Texts]:
    gsm8k = [row["answer"].partition("####") for row in read("gsm8k/test.jsonl", rows)]
    marked = [(gold.strip(), text.strip()) for text, _, gold in gsm8k]
    plain = [(gold, re.sub(r"<<[^>]*>>", "", text)) for gold, text in marked]
    math = [(row["answer"], BOX.sub(r"\1", row["solution"])) for row in read("math500/test.jsonl", rows)]
    return {"GSM8K": plain, "GSM8K with calculator marks": marked, "MATH-500": math}


def math_verify(pairs: Texts) -> list[bool]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(), ExprExtractionConfig()]
    return [verify(parse(f"${gold}$", config), parse(text, config)) for gold, text in pairs]


def ours(pairs: Texts) -> list[bool]:
    grades = grade_batch(
        [where.gold_answer(gold) for gold, _ in pairs],
        [rf"\boxed{{{where.find(text).text}}}" for _, text in pairs],
        timeout=20.0,
    )
    return [str(grade.verdict) == "correct" for grade in grades]


def told(said: list[bool]) -> str:
    low, high = wilson(sum(said), len(said))
    return f"{sum(said):5d} of {len(said)} ({sum(said) / len(said):.1%} [{low:.1%}, {high:.1%}])"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1319)
    options = parser.parse_args()
    for name, pairs in unmarked(options.rows).items():
        others = [(after[0], one[1]) for one, after in pairwise(pairs) if one[0] != after[0]]
        for who, grader in (("grpo_math", ours), ("Math-Verify", math_verify)):
            print(f"{name:28} {who:12} own gold {told(grader(pairs))}   the next row's {told(grader(others))}")
    shutdown()


if __name__ == "__main__":
    main()
