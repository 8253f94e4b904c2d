"""What an MLP in tiles costs of an update's CPU time: `OMP_NUM_THREADS=1 python tests/benchmarks/tiles.py`.

Forward and backward passes of layers of Qwen2.5-1.5B at half its width, with gradient checkpointing, in bfloat16, over
as many tokens as a micro-batch of gsm8k_8gb has (4 rows of 1,024). Plain and tiled take turns in one process; the ratio
is that of their sums, with a 95% bootstrap interval over the pairs. Says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_math.trainer import tiled_mlp

WHOLE, LEAST = 10**9, tiled_mlp.MIN_TOKENS
SHAPE = {"hidden_size": 768, "intermediate_size": 4480, "num_attention_heads": 6, "num_key_value_heads": 1}
ROWS, TOKENS, VOCABULARY = 4, 1024, 1024
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS: dict[str, Any] = {
    "LoRA on q, k, v, o, dropout 0.05 (gsm8k_8gb)": {"target_modules": ATTENTION, "lora_dropout": 0.05},
    "LoRA on all linear maps": {"target_modules": "all-linear"},
    "LoRA on all linear maps, dropout 0.05": {"target_modules": "all-linear", "lora_dropout": 0.05},
    "all weights": None,
}


def model_of(lora: dict[str, Any] | None, layers: int) -> Any:
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_hidden_layers=layers, vocab_size=VOCABULARY)).bfloat16()
    if lora is not None:
        model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=16, task_type="CAUSAL_LM", **lora))
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert tiled_mlp.set_up([model], in_updates=True) == layers
    return model


def seconds(model: Any, ids: torch.Tensor, least: int) -> float:
    """CPU time of one forward and backward pass."""
    model.zero_grad()
    tiled_mlp.MIN_TOKENS = least
    started = time.process_time()
    model(input_ids=ids, labels=ids).loss.backward()
    return time.process_time() - started


def interval(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """95% of the ratio of the sums, tiled over plain, when pairs are drawn again."""
    draw = random.Random(0)
    ratios = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(10_000))
    return ratios[250], ratios[-251]


def ratio(pairs: list[tuple[float, float]]) -> float:
    return sum(tiled for _, tiled in pairs) / sum(plain for plain, _ in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--only", default="", help="a part of a kind's name")
    args = parser.parse_args()
    print("| trained | CPU seconds, plain | tiled | tiled / plain |\n|---|---|---|---|")
    for kind in (kind for kind in KINDS if args.only in kind):
        model, pairs = model_of(KINDS[kind], args.layers), []
        ids = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
        seconds(model, ids, LEAST)  # to warm up
        for number in range(args.pairs):
            order = (WHOLE, LEAST) if number % 2 else (LEAST, WHOLE)
            took = {least: seconds(model, ids, least) for least in order}
            pairs.append((took[WHOLE], took[LEAST]))
        plain, tiled = (sum(times) / len(pairs) for times in zip(*pairs, strict=True))
        low, high = interval(pairs)
        print(f"| {kind} | {plain:.2f} | {tiled:.2f} | {ratio(pairs):.3f} [{low:.3f}, {high:.3f}] |", flush=True)


if __name__ == "__main__":
    main()
