"""How much of its gradient a completion keeps under each correction mode: `python tests/benchmarks/correction.py`.

A policy with one parameter: every token is 1 with probability 1/2, and a completion of T tokens is right if more than
half of them are 1. With S the sum of (token - 1/2), the exact gradient is E[(reward - mean) S]. The sampler's log-odds
differ from the policy's by known noise: of each token alone (sigma nats in a log-ratio), or a drift that all tokens
share. Completions come from the sampler; each mode's mean gradient is divided by the exact one, of as many completions
from the policy itself. 1 is exact; the numbers in brackets are 95% intervals over completions.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

MODES = ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")
LIMIT = 3.0  # TRL's vllm_importance_sampling_clip_max


def kept(sigma: float, drift: float, length: int, count: int, seed: int) -> dict[str, tuple[float, float]]:
    """Each mode's share of the exact gradient, with the half-width of its interval."""
    random = np.random.default_rng(seed)
    sums, scores = np.empty(count), {mode: np.empty(count) for mode in MODES}
    for row in range(count):
        odds = random.normal(2 * drift, 2 * sigma, length)
        sampler = 1 / (1 + np.exp(-odds))
        token = random.random(length) < sampler
        ratio = np.log(0.5) - np.log(np.where(token, sampler, 1 - sampler))
        part, whole, each = token - 0.5, math.exp(min(ratio.sum(), 50)), np.exp(ratio)
        sums[row] = part.sum()
        scores["sequence_mask"][row] = sums[row] * (whole if whole <= LIMIT else 0)
        scores["sequence_truncate"][row] = sums[row] * min(whole, LIMIT)
        scores["token_mask"][row] = (part * each * (each <= LIMIT)).sum()
        scores["token_truncate"][row] = (part * np.minimum(each, LIMIT)).sum()
    right = (sums > 0) + 0.5 * (sums == 0)
    advantages = right - right.mean()
    policy = random.binomial(length, 0.5, 100 * count) - length / 2
    exact = np.mean(((policy > 0) + 0.5 * (policy == 0) - 0.5) * policy)
    shares = {mode: advantages * score / exact for mode, score in scores.items()}
    return {mode: (value.mean(), 1.96 * value.std() / math.sqrt(count)) for mode, value in shares.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--completions", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("| sigma | drift | tokens | " + " | ".join(MODES) + " |\n|---|---|---|" + "---|" * len(MODES))
    for sigma, drift in ((0.01, 0.0), (0.025, 0.0), (0.06, 0.0), (0.0, 0.01)):
        for length in (256, 1024, 4096, 16384):
            shares = kept(sigma, drift, length, args.completions, args.seed)
            cells = (f"{mean:.2f} ± {half:.2f}" for mean, half in shares.values())
            print(f"| {sigma:g} | {drift:g} | {length:,} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
