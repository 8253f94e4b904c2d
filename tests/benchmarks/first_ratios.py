"""Tokens whose ratio is not 1 before any weight has changed, because old log-probs were scored in other rows.

    OMP_NUM_THREADS=1 python tests/benchmarks/first_ratios.py [--tokens 32]

The embedded model samples answers to GSM8K's problems, in float32. The same completions are then scored in several
layouts: packed with one group, both groups, or half a group to a pass, and padded as TRL does. In exact arithmetic all
give the same log-probs. Prints a JSON line for each dtype and layout: how far ratios to the first layout are from 1.

Does not measure vLLM's log-probs, which differ in kernels, too.
"""

import argparse
import json
import os
import tempfile

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from accelerate.utils import set_seed
from datasets import Dataset
from transformers import AutoModelForCausalLM

from grpo_math import MathGRPOConfig, MathGRPOTrainer, load_problems
from grpo_math.generation.models import load_tokenizer, model_path

OUTSIDE = 0.1  # of 1
GROUP, GROUPS = 8, 2


def rollout(path: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask of `GROUPS` groups of `GROUP` sampled completions; prompts are padded on the left."""
    tokenizer = load_tokenizer(path)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = [row["prompt"] for row in load_problems("gsm8k", f"train[:{GROUPS}]") for _ in range(GROUP)]
    texts = [tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True) for prompt in prompts]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    ids = model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, top_k=0, top_p=1.0)
    completions = torch.ones(len(ids), tokens, dtype=torch.long)
    return ids, torch.cat([inputs.attention_mask, completions], dim=1)


def scores(path: str, dtype: torch.dtype, ids: torch.Tensor, mask: torch.Tensor, tokens: int) -> dict:
    """Return the log-probs of each layout."""
    args = MathGRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=GROUP,
        num_generations=GROUP,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
    )
    trainer = MathGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=dtype),
        args=args,
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        train_dataset=Dataset.from_list(load_problems("gsm8k", "train[:8]")),
        processing_class=load_tokenizer(path),
    )
    trainer.model.eval()
    budget, found = trainer.grpo_math.scorer.packed.budget, {}
    group = mask[:GROUP].sum().item()
    for layout, most in {"a group": group, "both groups": 10**6, "half a group": group // 3}.items():
        budget.setting = most
        with torch.no_grad():
            found[layout] = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, tokens, GROUP)[0]
    trainer.grpo_math.scorer.packed = None
    with torch.no_grad():
        found["padded"] = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, tokens, GROUP)[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    set_seed(0)
    path = model_path("embedded")
    ids, mask = rollout(path, options.tokens)
    for dtype in (torch.float32, torch.bfloat16):
        first, *others = scores(path, dtype, ids, mask, options.tokens).items()
        for layout, logps in others:
            off = ((logps.double() - first[1].double()).exp() - 1).abs()
            figures = {"outside": (off > OUTSIDE).double().mean(), "median": off.median(), "largest": off.max()}
            line = {"dtype": str(dtype), "layout": layout, "tokens": off.numel()}
            print(json.dumps(line | {name: round(value.item(), 6) for name, value in figures.items()}), flush=True)


if __name__ == "__main__":
    main()
