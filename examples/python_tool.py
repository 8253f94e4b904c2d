"""GRPO with Python as a tool: TRL's `tools=[...]`, and each program runs in a separate process under bubblewrap.

    python examples/python_tool.py                       # Qwen3-0.6B; needs bwrap: apt install bubblewrap
    python examples/python_tool.py --model MODEL --max_steps 200

A program has no network, no environment, and no files except the system's, which it cannot change. The time, memory,
processes and output of a program are limited. A bug in the kernel opens this sandbox. The chat template of the model
has to support tools. At the end TRL's own loop evaluates held-out problems.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig

from grpo_math import MathGRPOConfig, MathGRPOTrainer, load_problems

BWRAP = shutil.which("bwrap") or "bwrap"
ALONE = "--unshare-all --die-with-parent --new-session --cap-drop ALL --proc /proc --dev /dev --tmpfs /tmp"
SYSTEM = [word for folder in ("/usr", "/lib", "/lib64", sys.base_prefix) for word in ("--ro-bind-try", folder, folder)]
# CPU seconds, bytes of memory of a process, processes, and bytes of a file, such as the output.
LIMITS = "--remount-ro / /usr/bin/prlimit --cpu=5 --as=1000000000 --nproc=32 --fsize=64000"
SECONDS, CHARACTERS = 10, 2000


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program.
    """
    words = [BWRAP, *ALONE.split(), *SYSTEM, *LIMITS.split(), f"{sys.base_prefix}/bin/python3", "-I", "-c", code]
    with tempfile.TemporaryFile() as output:
        try:
            # Without the environment, which may have keys: a program can read that of the processes around it.
            subprocess.run(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=SECONDS, env={})
        except (subprocess.TimeoutExpired, ValueError, OSError) as error:  # a model may write a NUL, or 100 KB
            return type(error).__name__
        output.seek(0)
        return output.read(CHARACTERS).decode(errors="replace")


def problems(split: str, n: int | None = None) -> Dataset:
    prompt = "{problem} Calculate with Python, then give the number after ####."
    return Dataset.from_list(load_problems("generated:long_products", split, limit=n, template=prompt))


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO with Python as a tool")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a folder or a name on the Hub")
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--max_completion_length", type=int, default=512, help="with the results of calls")
    parser.add_argument("--output_dir", default="runs/python_tool")
    options = parser.parse_args()
    if (printed := python("print(3 + 4)")) != "7\n":
        sys.exit(f"error: bwrap cannot start a program here ({printed.strip()}): apt install bubblewrap")

    gpu = torch.cuda.is_available()
    trainer = MathGRPOTrainer(
        model=options.model,
        reward_funcs="gsm8k",
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
        train_dataset=problems("train"),
        tools=[python],
        peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear"),
    )
    trainer.train()
    held_out = trainer.evaluate(problems("heldout", 64))
    print(f"mean reward of 64 held-out problems: {held_out['eval_reward']:.2f}")


if __name__ == "__main__":
    main()
