"""GRPO in an environment: the model solves an equation by calls that check a guess or ask for a hint.

    python examples/environment.py                       # Qwen3-0.6B
    python examples/environment.py --model MODEL --max_steps 200

An environment is a class of yours (TRL's `environment_factory`): each completion gets an instance, `reset` gets the row
of its problem, the other methods are the model's tools, and `get_reward` pays for the whole completion. The chat
template of the model has to support tools. At the end TRL's own loop evaluates held-out problems.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig

from grpo_math import MathGRPOConfig, MathGRPOTrainer


class Equation:
    """A linear equation with an integer as its solution. A solution without a hint is worth 1, each hint costs 0.2."""

    def reset(self, coefficients, solution, **row) -> None:
        self.coefficients, self.solution = coefficients, solution
        self.is_solved, self.hints = False, 0

    def check(self, x: int) -> str:
        """Check a guess for x.

        Args:
            x: The guess.
        """
        a, b = self.coefficients
        try:
            difference = a * int(x) + b - (a * self.solution + b)
        except (TypeError, ValueError):  # a model may give anything
            return "x is not an integer"
        self.is_solved |= difference == 0
        return "right" if difference == 0 else f"the left side is too {'large' if difference > 0 else 'small'}"

    def hint(self) -> str:
        """Ask for a hint."""
        self.hints += 1
        return f"x is between {self.solution - 2} and {self.solution + 2}"

    def get_reward(self) -> float:
        return max(0.2, 1 - 0.2 * self.hints) if self.is_solved else 0.0


def problems(numbers) -> Dataset:
    """Return a row of each number: a prompt, and what `Equation.reset` gets."""
    rows = []
    for n in numbers:
        a, b, x = 2 + n % 7, n % 11, 1 + n % 13
        text = f"Find the integer x with {a}x + {b} = {a * x + b}. Check it with the tool."
        rows.append({"prompt": [{"role": "user", "content": text}], "coefficients": [a, b], "solution": x})
    return Dataset.from_list(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO in an environment")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a folder or a name on the Hub")
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--max_completion_length", type=int, default=256, help="with the results of calls")
    parser.add_argument("--output_dir", default="runs/environment")
    options = parser.parse_args()

    gpu = torch.cuda.is_available()
    trainer = MathGRPOTrainer(
        model=options.model,
        args=MathGRPOConfig(
            options.output_dir,
            max_steps=options.max_steps,
            per_device_train_batch_size=16,  # 2 problems of 8 completions each
            per_device_eval_batch_size=16,
            num_generations=8,
            num_generations_eval=1,
            max_completion_length=options.max_completion_length,
            max_tool_calling_iterations=4,
            chat_template_kwargs={"enable_thinking": False},
            learning_rate=1e-4,
            logging_steps=1,
            use_cpu=not gpu,
            bf16=gpu,
            report_to="none",
        ),
        train_dataset=problems(range(900)),
        environment_factory=Equation,
        peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear"),
    )
    trainer.train()
    held_out = trainer.evaluate(problems(range(900, 1001)).select(range(64)))
    print(f"mean reward of 64 held-out equations: {held_out['eval_reward']:.2f}")


if __name__ == "__main__":
    main()
