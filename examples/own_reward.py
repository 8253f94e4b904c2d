"""GRPO on sums with a reward of one's own: a script for TRL's `GRPOTrainer` in which two names are grpo_math's.

    python examples/own_reward.py                                          # SmolLM2-135M, on a CPU too
    python examples/own_reward.py --model Qwen/Qwen2.5-0.5B-Instruct --max_steps 200

It leaves a run directory: `grpo-math report runs/own_reward`. own_reward.yaml is the same as a recipe: that adds an
evaluation before and after, and resuming. sums.ipynb is a notebook.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig

from grpo_math import MathGRPOConfig, MathGRPOTrainer, Verdict, load_problems


def concise(completions, grade, **columns):
    """1 for a right answer, less for a long one, 0 for a wrong one; None where the answer could not be graded.

    TRL's signature: each argument is a list with one entry a completion, and every column of the data set is among
    them. `grade` is what grpo_math adds wherever there is an `answer` column: the grader's verdict on each completion.
    """
    rewards = []
    for completion, graded in zip(completions, grade, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        if graded.verdict.ungradable:  # a killed worker is no wrong answer: TRL leaves None out of the group's mean
            rewards.append(None)
        else:
            right = graded.verdict == Verdict.CORRECT
            rewards.append(max(0.5, 1 - len(text) / 400) if right else 0.0)
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO with a reward of one's own")
    parser.add_argument("--model", default="embedded", help="a folder or a name on the Hub; embedded: SmolLM2-135M")
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--output_dir", default="runs/own_reward")
    options = parser.parse_args()

    gpu = torch.cuda.is_available()
    trainer = MathGRPOTrainer(
        model=options.model,
        reward_funcs=concise,
        args=MathGRPOConfig(
            options.output_dir,
            max_steps=options.max_steps,
            per_device_train_batch_size=32,  # 4 problems of 8 completions each
            num_generations=8,
            max_completion_length=32,
            temperature=1.3,
            advantage_eps=1e-6,
            learning_rate=2e-4,
            logging_steps=1,
            use_cpu=not gpu,
            bf16=gpu,
            report_to="none",
        ),
        # Rows with the columns prompt, problem, answer and more; a path to a .jsonl file of your own works as well.
        train_dataset=Dataset.from_list(load_problems("generated:sums")),
        peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
