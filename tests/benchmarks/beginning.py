"""What an evaluation takes with the prompts' common beginning prefilled once, and once a prompt: the ratio of CPU time.

    OMP_NUM_THREADS=1 python tests/benchmarks/beginning.py [--dtype bfloat16] [--n 64] [--rounds 3]

SmolLM2-135M-Instruct on the quickstart's held-out sums, greedy, 16 tokens, in one process, by turns. The texts are the
same in float32; in bfloat16 some near ties fall otherwise.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from transformers import AutoModelForCausalLM

from grpo_math.generation import cache
from grpo_math.generation.completions import token_ids, with_model
from grpo_math.generation.models import load_tokenizer, model_path
from grpo_math.problems.datasets import load_problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    path = model_path("embedded")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype))
    tokenizer = load_tokenizer(path)
    prompts = [row["prompt"] for row in load_problems("generated:sums", "heldout", template="gsm8k", limit=args.n)]
    ids = sorted(token_ids(tokenizer, prompts), key=len)
    ways = {"once a prompt": 10**9, "once": cache.SAVED}
    seconds, texts = {way: [] for way in ways}, {}
    for _ in range(args.rounds):
        for way, cache.SAVED in ways.items():
            start = time.process_time()
            generate = with_model(model, tokenizer, temperature=0.0, max_new_tokens=16)
            texts[way] = [one.text for i in range(0, args.n, 32) for one in generate(ids[i : i + 32], 0)]
            seconds[way].append(time.process_time() - start)
    plain, ours = (median(times) for times in seconds.values())
    same = sum(a == b for a, b in zip(*texts.values(), strict=True))
    print(
        f"{args.dtype}: {plain:.1f} to {ours:.1f} CPU seconds, {plain / ours:.2f}x; {same} of {args.n} texts the same"
    )


if __name__ == "__main__":
    main()
