"""Seconds of training until a held-out accuracy, by stock TRL or ours: for docs/internals.md.

    OMP_NUM_THREADS=1 python tests/benchmarks/time_to_accuracy.py trl|ours [--seed 0]

Trains the quickstart's task (launch/configs/demo_cpu.yaml), but writes the sum out, in the CPU's fastest dtype: the
same model, LoRA, data, prompts, reward function and seed, a constant rate, and TRL's constant in the advantage. The
64 rows of an optimizer step come in micro-batches of 8: all at once, stock TRL's padded rows would need some 30 GB.
Every 5 steps held-out sums are answered greedily, and a JSON line says the accuracy. The clock is the CPU time of the
training process without those evaluations; on a GPU, the time that passes, synchronised. The target is reached at the
first evaluation that has it, if the next has it too.
"""

import argparse
import json
import os
import tempfile
import time

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import yaml
from accelerate.utils import set_seed
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_math import MathGRPOConfig, MathGRPOTrainer, evaluate
from grpo_math.generation.dtypes import fast_dtype
from grpo_math.generation.models import load_tokenizer, model_path
from grpo_math.problems.datasets import load_problems
from grpo_math.rewards import load_reward
from grpo_math.settings.shipped import find

EVERY, MOST = 5, 40  # steps between evaluations, and at most
TARGET = 0.65  # held-out accuracy
MICRO_BATCH = 8  # rows
TOKENS = 16  # of a completion


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


class Clock(TrainerCallback):
    """Seconds of training. The clock stops while the model answers the held-out problems."""

    def __init__(self, held_out, tokenizer):
        self.held_out, self.tokenizer, self.seconds, self.lines = held_out, tokenizer, 0.0, []

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = now()

    def on_step_end(self, args, state, control, model, **kwargs):
        self.seconds += now() - self.started
        if state.global_step % EVERY:
            return
        sampling = {"max_new_tokens": TOKENS, "batch_size": 64, "progress": False}
        results = evaluate(model, self.held_out, tokenizer=self.tokenizer, **sampling)
        accuracy = results["accuracy_in_format"]  # what the reward pays
        self.lines.append({"step": state.global_step, "seconds": self.seconds, "accuracy": accuracy})
        print(json.dumps(self.lines[-1]), flush=True)
        if len(self.lines) > 1 and min(line["accuracy"] for line in self.lines[-2:]) >= TARGET:
            print(json.dumps({"reached": TARGET, "seconds": self.lines[-2]["seconds"]}))
            control.should_training_stop = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trainer", choices=("trl", "ours"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    recipe = yaml.safe_load(find("launch/configs/demo_cpu.yaml").read_text(encoding="utf-8"))
    settings = {name: value for name, value in recipe.items() if name in GRPOConfig.__dataclass_fields__} | {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": MOST,
        "seed": options.seed,
        # Those of the figures in docs/internals.md; the recipe has had others since.
        "learning_rate": 2e-4,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "num_generations": 8,
        "temperature": 1.3,
        "max_completion_length": TOKENS,
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": 64 // MICRO_BATCH,
        "model_init_kwargs": {"dtype": fast_dtype()},
        "log_completions": False,
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    path = model_path(recipe["model_name_or_path"])
    tokenizer = load_tokenizer(path)
    problems = load_problems(recipe["dataset"], "train", template="gsm8k", seed=options.seed)
    held_out = load_problems(recipe["dataset"], recipe["eval_split"], template="gsm8k", limit=128)
    set_seed(options.seed)  # the adapters start alike
    ours = options.trainer == "ours"
    adapter = {name: recipe[name] for name in ("lora_alpha", "lora_dropout")}
    trainer = (MathGRPOTrainer if ours else GRPOTrainer)(
        model=path,
        reward_funcs=[load_reward(name) for name in recipe["rewards"]],
        args=MathGRPOConfig(**settings) if ours else GRPOConfig(**settings),
        train_dataset=Dataset.from_list(problems),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=recipe["lora_r"], target_modules=recipe["lora_target_modules"], **adapter),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Clock(held_out, tokenizer))
    trainer.train()


if __name__ == "__main__":
    main()
