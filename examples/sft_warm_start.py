"""Supervised fine-tuning with LoRA by TRL's `SFTTrainer`, before a GRPO run that trains the same adapter further.

    python examples/sft_warm_start.py                        # sums with SmolLM2-135M, on a CPU too
    grpo-math train demo_cpu --adapter runs/sft --output_dir runs/sft_grpo
    python examples/sft_warm_start.py --model MODEL --run runs/mine    # a run's correct completions

The first one learns the form of an answer from 64 problems. Rank and alpha are those of the shipped recipes.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from grpo_math import load_problems
from grpo_math.generation.models import model_path


def solved_problems() -> Dataset:
    rows = load_problems("generated:sums", template="direct", limit=64)
    answers = [[{"role": "assistant", "content": f"#### {row['answer']}"}] for row in rows]
    return Dataset.from_list([{"prompt": row["prompt"], "completion": a} for row, a in zip(rows, answers, strict=True)])


def correct_completions(run: str) -> Dataset:
    rows = load_dataset("parquet", data_files=f"{run}/completions/*.parquet", split="train")
    # Also outside the format, a correct answer is rare enough at first: drop in_format to train on it, too.
    rows = rows.filter(lambda row: row["verdict"] == "correct" and row["in_format"] and not row["truncated"])
    return rows.select_columns(["prompt", "completion"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Supervised fine-tuning with LoRA before GRPO")
    parser.add_argument("--model", default="embedded", help="a folder or a name on the Hub; embedded: SmolLM2-135M")
    parser.add_argument("--run", help="a run directory with completions/")
    parser.add_argument("--output_dir", default="runs/sft")
    parser.add_argument("--max_steps", type=int, default=16)
    options = parser.parse_args()

    gpu = torch.cuda.is_available()
    trainer = SFTTrainer(
        model=model_path(options.model),
        args=SFTConfig(
            options.output_dir,
            max_steps=options.max_steps,
            per_device_train_batch_size=4,
            learning_rate=1e-4,
            bf16=gpu,
            use_cpu=not gpu,
            save_strategy="no",
            report_to="none",
        ),
        # TRL trains on the completions alone, because each row has a prompt and a completion.
        train_dataset=correct_completions(options.run) if options.run else solved_problems(),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model(options.output_dir)


if __name__ == "__main__":
    main()
