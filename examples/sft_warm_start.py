"""Supervised fine-tuning on the correct completions of a run, before another GRPO run.

python examples/sft_warm_start.py --model MODEL --run runs/demo --output_dir runs/sft
grpo-math train --config RECIPE --model_name_or_path runs/sft
"""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser(description="Supervised fine-tuning on a run's correct completions.")
parser.add_argument("--model", required=True)
parser.add_argument("--run", default="runs/demo", help="a run directory with completions/")
parser.add_argument("--output_dir", default="runs/sft")
parser.add_argument("--max_steps", type=int, default=-1)
options = parser.parse_args()

rows = load_dataset("parquet", data_files=f"{options.run}/completions/*.parquet", split="train")
# Also outside the format, a correct answer is rare enough at first: drop in_format to train on it, too.
rows = rows.filter(lambda row: row["verdict"] == "correct" and row["in_format"] and not row["truncated"])

trainer = SFTTrainer(
    model=options.model,
    args=SFTConfig(
        options.output_dir,
        max_steps=options.max_steps,
        learning_rate=1e-4,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    ),
    # TRL trains on the completions alone, because each row has a prompt and a completion.
    train_dataset=rows.select_columns(["prompt", "completion"]),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
trainer.train()
# Merged, because a GRPO run starts from a whole model and trains a new adapter.
merged = trainer.model.merge_and_unload()
merged.save_pretrained(options.output_dir)
trainer.processing_class.save_pretrained(options.output_dir)
