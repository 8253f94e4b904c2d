"""What turns with a tool take where each goes on from the one before it, and computed anew: the ratio of CPU time.

    OMP_NUM_THREADS=1 python tests/benchmarks/turns.py [--n 64] [--rounds 3] [--seed 0]

SmolLM2-135M-Instruct with the Python tool on products of three- and four-digit numbers, sampled as in training, in
float32 and in one process, by turns. The texts are the same. The programs run in processes of their own, which are not
counted.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from transformers import AutoModelForCausalLM

from grpo_math.evaluation.backends import Model, Sampling
from grpo_math.evaluation.results import answer
from grpo_math.evaluation.toolbox import toolbox
from grpo_math.generation import cache
from grpo_math.generation.models import load_tokenizer, model_path
from grpo_math.problems.datasets import load_problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    path = model_path("embedded")
    weights = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = Model(weights, tokenizer=load_tokenizer(path))
    tools = toolbox(["python"])
    assert tools is not None
    sampling = Sampling(temperature=1.0, max_new_tokens=160, seed=args.seed)
    rows = load_problems("generated:long_products", "heldout", template="python", limit=args.n)
    fill, seconds, texts = cache.TurnCache.fill, {}, {}
    for _ in range(args.rounds):
        for way in (fill, lambda self, prompts, model_kwargs: 0):
            cache.TurnCache.fill = way  # type: ignore[method-assign]
            start = time.process_time()
            said = answer(model, rows, sampling, tools=tools)
            seconds.setdefault(way is fill, []).append(time.process_time() - start)
            texts[way is fill] = [one["turns"] for one in said]
    anew, ours = median(seconds[False]), median(seconds[True])
    same = sum(a == b for a, b in zip(*texts.values(), strict=True))
    calls = sum(one["calls"] for one in said)
    print(
        f"{calls} calls in {args.n} conversations: {anew:.1f} to {ours:.1f} CPU seconds, {anew / ours:.2f}x; "
        f"{same} of {args.n} the same, seed {args.seed}"
    )


if __name__ == "__main__":
    main()
