"""What each reward function pays a policy of blind guesses: the table of docs/grading.md.

    GRPO_MATH_DATA=DATA python tests/benchmarks/reward_farms.py

For each reward, the mean over golds of GSM8K of what it pays the gold in its format, and of the best of the policies
that write the same for every problem: nothing, the format around a word or around a constant, a list of numbers,
a text that never repeats. The hedges know the gold V and another number W, and do not decide: two answers in the
format, "or" within one, the gold outside of it.

Does not train: what a policy can farm, it has to find first.
"""

import json
import os
import random
from pathlib import Path
from statistics import fmean

from grpo_math.grading import shutdown
from grpo_math.grading.formats import example_completion
from grpo_math.rewards import REWARDS

CONSTANTS = (0, 1, 2, 5, 10, 12, 15, 20, 24, 30, 36, 40, 50, 60, 72, 80, 100, 120, 200, 500)
FORMATS = {"r1_zero": "r1_zero", "xml_count": "xml"}  # of the rewards that are about another than gsm8k


def blind(answer_format: str) -> dict[str, str]:
    """Completions that are the same for every problem."""
    return {
        "nothing": "",
        "the format and a word": example_completion("so", answer_format),
        "the format and 0 to 100": example_completion(", ".join(map(str, range(101))), answer_format),
        "words that do not repeat": " ".join(f"word{i}" for i in range(40)),
        **{f"always {constant}": example_completion(str(constant), answer_format) for constant in CONSTANTS},
    }


def hedged(gold: str, wrong: str, answer_format: str) -> dict[str, str]:
    """Completions that hold the gold and another number."""
    return {
        "two answers": example_completion(wrong, answer_format) + "\n" + example_completion(gold, answer_format),
        "W or V": example_completion(f"{wrong} or {gold}", answer_format),
        "V W": example_completion(f"{gold} {wrong}", answer_format),
        "W = V": example_completion(f"{wrong} = {gold}", answer_format),
        "not V": example_completion(f"not {gold}", answer_format),
        "V in prose, W as the answer": f"It is {gold}.\n" + example_completion(wrong, answer_format),
    }


def mean(name: str, golds: list[str], texts: list[str]) -> float:
    formats = [FORMATS.get(name, "gsm8k")] * len(golds)
    rewards = REWARDS[name]([""] * len(golds), texts, answer=golds, answer_format=formats, max_completion_length=256)
    return fmean(reward for reward in rewards if reward is not None)


def main() -> None:
    rng = random.Random(0)
    lines = (Path(os.environ["GRPO_MATH_DATA"]) / "gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()
    golds = [json.loads(line)["answer"].rpartition("####")[2].strip() for line in rng.sample(lines, 300)]
    pairs = [(gold, str(int(gold.replace(",", "")) + rng.choice((1, 2, 5, 10)))) for gold in golds]
    print("| reward | right | best blind guess | pays | best hedge | pays |\n|---|---|---|---|---|---|")
    for name in sorted(REWARDS):
        form = FORMATS.get(name, "gsm8k")
        right = mean(name, golds, [example_completion(gold, form) for gold in golds])
        knowing_nothing = {case: mean(name, golds, [text] * len(golds)) for case, text in blind(form).items()}
        texts = [hedged(gold, wrong, form) for gold, wrong in pairs]
        hedges = {case: mean(name, golds, [text[case] for text in texts]) for case in texts[0]}
        best, hedge = max(knowing_nothing, key=knowing_nothing.__getitem__), max(hedges, key=hedges.__getitem__)
        print(f"| `{name}` | {right:.2f} | {best} | {knowing_nothing[best]:.2f} | {hedge} | {hedges[hedge]:.2f} |")
    shutdown()


if __name__ == "__main__":
    main()
