"""How fast answers are graded: the exact path on GSM8K, and the pool against Math-Verify in a loop on MATH.

    GRPO_MATH_DATA=DATA python tests/benchmarks/grading.py [--rows 1000]

Prints GSM8K answers a second (this process alone), then MATH answers a second for three ways of grading the same pairs
in the same run: Math-Verify called in a loop in the main thread with the wrapping its README asks for, our pool with
every pair sent to it (no quick path), and `grade_batch` as users call it. Half of the pairs are an answer with its own
solution's last box, half with the next row's.

Does not test anything: tests/grading does.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from grpo_math.grading import grade_batch, shutdown
from grpo_math.grading.where import find
from grpo_math.grading.workers import default_size, shared_pool


def rows(*names):
    data = Path(os.environ["GRPO_MATH_DATA"])
    return [json.loads(line) for name in names for line in (data / name).read_text(encoding="utf-8").splitlines()]


def gsm8k() -> None:
    answers = [row["answer"] for row in rows("gsm8k/train.jsonl", "gsm8k/test.jsonl")]
    rates = []
    for _ in range(3):
        started = time.perf_counter()
        grade_batch(answers, answers)
        rates.append(len(answers) / (time.perf_counter() - started))
    best, worst = max(rates), min(rates)
    print(f"GSM8K, exact path, one core: {best:,.0f} answers/s (n={len(answers)}, best of 3; worst {worst:,.0f})")


def math(n: int) -> None:
    from math_verify import parse, verify

    math_rows = rows("math500/test.jsonl", "math/test_outside_math500.jsonl")[: n // 2 + 1]
    pairs = [(row["answer"], find(row["solution"]).text) for row in math_rows[:-1]]
    pairs += [(row["answer"], pairs[(i + 1) % len(pairs)][1]) for i, row in enumerate(math_rows[:-1])]
    pool = shared_pool()
    pool.run([("x", "x+0")] * pool.size, 5.0)  # start the workers
    parse("$1$"), verify(parse("$1$"), parse("$1$"))

    started = time.perf_counter()
    loop = [verify(parse(f"${gold}$"), parse(f"${answer}$")) for gold, answer in pairs]
    loop_rate = len(pairs) / (time.perf_counter() - started)
    started = time.perf_counter()
    outcomes = pool.run(pairs, 5.0)
    pool_rate = len(pairs) / (time.perf_counter() - started)
    started = time.perf_counter()
    grade_batch([gold for gold, _ in pairs], [f"\\boxed{{{answer}}}" for _, answer in pairs])
    batch_rate = len(pairs) / (time.perf_counter() - started)
    agree = sum(yes == (str(o.verdict) == "correct") for yes, o in zip(loop, outcomes, strict=True))
    print(f"MATH, n={len(pairs)} pairs, {default_size()} workers; the two agree on {agree}")
    print(f"  Math-Verify in a loop        {loop_rate:10,.0f} answers/s")
    print(f"  our pool, every pair         {pool_rate:10,.0f} answers/s   {pool_rate / loop_rate:6.1f} times")
    print(f"  grade_batch                  {batch_rate:10,.0f} answers/s   {batch_rate / loop_rate:6.1f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000, help="MATH pairs")
    options = parser.parse_args()
    gsm8k()
    math(options.rows)
    shutdown()


if __name__ == "__main__":
    sys.exit(main())
