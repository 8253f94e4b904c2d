"""What a step takes with `staleness` 1, against sampling and training by turns: their sum, and the longer one.

    OMP_NUM_THREADS=1 python tests/benchmarks/ahead.py [--sampling 3] [--training 3] [--steps 6]

A stand-in for a vLLM server (tests/small_vllm.py) waits before it answers, and so does the reward; a tiny random model
is sampled from and trained, which takes its time on top. Steps after the second: the first two have the canary.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

import small_vllm
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_math.generation.models import load_tokenizer, model_path
from grpo_math.run.metrics import SECONDS_GENERATE, SECONDS_STEP


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sampling", type=float, default=3.0, help="seconds that the server waits")
    parser.add_argument("--training", type=float, default=3.0, help="seconds that the trainer waits")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    tokenizer, letters = load_tokenizer(model_path("embedded")), small_vllm.letters

    def slow(completions, **columns):
        time.sleep(options.training)
        return letters(completions)

    small_vllm.letters = slow
    with tempfile.TemporaryDirectory() as folder:
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        LlamaForCausalLM(LlamaConfig(vocab_size=49152, **shape)).save_pretrained(f"{folder}/model")
        small = small_vllm.SmallVLLM(f"{folder}/model")
        small.sampling = lambda body: time.sleep(options.sampling if body["temperature"] else 0)
        found = {}
        for staleness in (0, 1):
            settings = {"staleness": staleness, "max_steps": options.steps}
            run = f"{folder}/{staleness}"
            trainer = small_vllm.trainer_of(small.url, lambda: f"{folder}/model", tokenizer, run, **settings)
            trainer.train()
            lines = [line for line in trainer.state.log_history if "loss" in line][2:]
            found[staleness] = [
                median(float(line[name]) for line in lines) for name in (SECONDS_STEP, SECONDS_GENERATE)
            ]
        small.stop()
    (by_turns, sampling), (ahead, waited) = found[0], found[1]
    longer = max(sampling, by_turns - sampling)
    print(f"by turns: {by_turns:.2f} s a step, of which sampling {sampling:.2f}")
    share = f"{ahead / longer:.2f} of the longer one ({longer:.2f} s)"
    print(f"staleness 1: {ahead:.2f} s, of which waiting {waited:.2f}: {share}")
    print(f"{by_turns / ahead:.2f}x")


if __name__ == "__main__":
    main()
