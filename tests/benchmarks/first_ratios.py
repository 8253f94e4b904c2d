"""Tokens whose ratio is not 1 in the first pass over a rollout, because old log-probs come from other rows.

    OMP_NUM_THREADS=1 python tests/benchmarks/first_ratios.py [--rollouts 1] [--tokens 32]

The embedded model samples answers to GSM8K's problems. The rollout is used twice (``num_iterations: 2``), so that its
old log-probs are scored before the update, in other batches than the update's. The learning rate moves no weight, so
that every ratio would be 1 in exact arithmetic. Prints a JSON line for each dtype, packed and as TRL pads.

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
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PrinterCallback

from grpo_math import MathGRPOConfig, MathGRPOTrainer, load_problems
from grpo_math.generation.models import load_tokenizer, model_path

OUTSIDE = 0.1  # of 1
GROUP, GROUPS = 8, 2


def log_ratios(dtype: torch.dtype, packed: bool, rollouts: int, tokens: int) -> torch.Tensor:
    """Return the log-ratios of all tokens of the updates."""
    set_seed(0)
    path = model_path("embedded")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    args = MathGRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=GROUP,
        gradient_accumulation_steps=GROUPS,
        num_generations=GROUP,
        num_iterations=2,
        max_steps=2 * rollouts - 1,
        max_completion_length=tokens,
        learning_rate=1e-30,
        pack_updates=packed,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        log_completions=False,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
    )
    trainer = MathGRPOTrainer(
        model=model,
        args=args,
        reward_funcs=lambda completions, **columns: [float(len(text[0]["content"]) % 7) for text in completions],
        train_dataset=Dataset.from_list(load_problems("gsm8k", "train[:64]")),
        processing_class=load_tokenizer(path),
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.remove_callback(PrinterCallback)
    seen, inputs_of_loss = [], trainer._loss_inputs

    def recorded(*arguments):
        inputs = inputs_of_loss(*arguments)
        seen.append((inputs.logps.detach() - inputs.old_logps)[inputs.mask.bool()])
        return inputs

    trainer._loss_inputs = recorded
    trainer.train()
    return torch.cat(seen).float().cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    for dtype in (torch.bfloat16, torch.float32):
        for packed in (True, False):
            log_ratio = log_ratios(dtype, packed, options.rollouts, options.tokens)
            off = (log_ratio.exp() - 1).abs()
            print(
                json.dumps(
                    {
                        "dtype": str(dtype).removeprefix("torch."),
                        "rows": "packed" if packed else "padded",
                        "tokens": len(off),
                        "outside": (off > OUTSIDE).double().mean().item(),
                        "not_1": (off > 0).double().mean().item(),
                        "median": off.median().item(),
                        "largest": off.max().item(),
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
