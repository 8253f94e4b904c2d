"""Supervised fine-tuning on the correct completions of a run, before another GRPO run.

grpo-math select runs/demo --to sft.jsonl
python examples/sft_warm_start.py --model MODEL --data sft.jsonl --output_dir runs/sft
grpo-math train --config RECIPE --model_name_or_path runs/sft
"""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser(description="Supervised fine-tuning on selected completions.")
parser.add_argument("--model", required=True)
parser.add_argument("--data", default="sft.jsonl")
parser.add_argument("--output_dir", default="runs/sft")
parser.add_argument("--max_steps", type=int, default=-1)
options = parser.parse_args()

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
    train_dataset=load_dataset("json", data_files=options.data, split="train"),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
trainer.train()
# Merged, because a GRPO run starts from a whole model and trains a new adapter.
merged = trainer.model.merge_and_unload()
merged.save_pretrained(options.output_dir)
trainer.processing_class.save_pretrained(options.output_dir)
