"""What would it have cost to sample a run's groups in two parts, and to go on only with those that teach?

    python tests/benchmarks/screening.py RUN [RUN ...]

A group of G completions moves weights if its rewards differ. Screened, N completions of a prompt are sampled first, and
the other G - N only if the rewards of those N differ; prompts are drawn until as many groups are full as a step has.
That is dynamic sampling with a look ahead (SPEED-RL, arXiv 2506.09016): a prompt that is right with probability p is
drawn with weight 1 - p^N - (1 - p)^N, where DAPO's (``resample_groups``) has 1 - p^G - (1 - p)^G.

From the groups that a finished run has sampled: how many completions one group costs whose rewards differ. In whole,
G / P(they differ); screened, N / P(those of N of its G differ) + G - N, over all choices of N. By thirds of the run, as
what is dull changes; and how many of the problems came more than once, without which no rate of passing can be known.

Does not train: a screened run would sample other groups. Those of a step are drawn by the same weights.
"""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import pairwise
from math import comb
from pathlib import Path
from statistics import fmean

from grpo_math.report.groups import groups
from grpo_math.report.run_dir import read_run

SCREENS = (2, 3, 4)


def differ(rewards: list[float], n: int) -> float:
    """The probability that n of these rewards, drawn without replacement, are not all the same."""
    return 1 - sum(comb(times, n) for times in Counter(rewards).values()) / comb(len(rewards), n)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    for run in parser.parse_args().runs:
        found = [
            (group.step, group.rows[0].get("problem_id"), group.rewards) for group in groups(read_run(run).completions)
        ]
        size = len(found[0][2])
        times = Counter(problem for _, problem, _ in found)
        again = sum(n > 1 for n in times.values())
        print(f"{run}: {len(found)} groups of {size}, {len(times)} problems, {again} of them more than once")
        print(f"{'steps':>10}  {'dull':>5}  {'in whole':>8}" + "".join(f"  {f'{n} first':>8}" for n in SCREENS))
        last = max(step for step, _, _ in found)
        for start, end in pairwise([0, last // 3, 2 * last // 3, last]):
            rewards = [rewards for step, _, rewards in found if start < step <= end]
            mixed = fmean(differ(one, size) for one in rewards)
            screened = [n / fmean(differ(one, n) for one in rewards) + size - n for n in SCREENS]
            costs = "".join(f"  {cost:8.1f}" for cost in (size / mixed, *screened))
            print(f"{f'{start + 1}-{end}':>10}  {1 - mixed:5.0%}{costs}")


if __name__ == "__main__":
    main()
