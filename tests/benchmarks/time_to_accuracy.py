"""Stock TRL and ours train the quickstart's task from the same seed; who holds the target accuracy first?

Both follow launch/configs/demo_cpu.yaml, but write the sum out, in the CPU's fastest dtype: model, LoRA, data, prompts,
reward function, TRL's constant in the advantage. Every few steps held-out sums are answered greedily. The clock is
the CPU time of the training process without those evaluations; a trainer has reached the target at the first evaluation
that has it, if the next has it too, and then stops. Each trains in a process of its own, one after the other, so that
neither runs in memory that the other left behind. Every evaluation is a JSON line as it comes; the last line is the
comparison.

Both take the recipe's 64 rows an optimizer step in micro-batches of 8 (``--micro_batch``): 8 of stock TRL's padded rows
already take it to 4.8 GB, and all 64 at once would need some 30. The gradient is the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
warnings.simplefilter("ignore", FutureWarning)

EVERY = 5  # steps between evaluations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="most optimizer steps of each (default: 60)")
    parser.add_argument("--target", type=float, default=0.60, help="held-out accuracy (default: 0.60)")
    parser.add_argument("--held_out", type=int, default=64, help="problems of an evaluation (default: 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--micro_batch", type=int, default=8, help="rows of a micro-batch (default: 8)")
    parser.add_argument("--trainer", choices=("trl", "ours"), help="train only this one, in this process")
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        train(options)
        return 0
    runs: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("trl", "ours"):
            command = [sys.executable, __file__, *sys.argv[1:], "--trainer", kind, "--folder", folder]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout
                runs[kind] = []
                for line in child.stdout:
                    print(line, end="", flush=True)
                    if line.startswith("{"):  # DeepSpeed says on stdout that there is no GPU
                        runs[kind].append(json.loads(line))
            if child.returncode:
                return child.returncode
        difference = _difference(Path(folder))
    seconds = {
        kind: reached([line for line in lines if line["accuracy"] is not None], options.target)
        for kind, lines in runs.items()
    }
    both = seconds["trl"] is not None and seconds["ours"] is not None
    comparison = {
        "target": options.target,
        "seconds_trl": seconds["trl"],
        "seconds_ours": seconds["ours"],
        "ratio": seconds["trl"] / seconds["ours"] if both else None,
        **{f"seconds_a_step_{kind}": lines[-1]["seconds"] / lines[-1]["step"] for kind, lines in runs.items()},
        **{f"peak_gb_{kind}": lines[-1]["peak_gb"] for kind, lines in runs.items()},
        "weights_difference_after_step_1": difference,
    }
    print(json.dumps(comparison))
    return 0 if both and comparison["ratio"] >= 2.2 else 1


def reached(lines: list[dict[str, Any]], target: float) -> float | None:
    """The seconds of the first evaluation at or above the target whose successor is so too; None where none is.

    >>> reached([{"seconds": s, "accuracy": a} for s, a in ((1, 0.5), (2, 0.7), (3, 0.5), (4, 0.6), (5, 0.6))], 0.6)
    4
    """
    for line, following in itertools.pairwise(lines):
        if min(line["accuracy"], following["accuracy"]) >= target:
            return line["seconds"]
    return None


def train(options: argparse.Namespace) -> None:
    """One training run in this process; a JSON line for step 1 and each evaluation."""
    import torch
    import yaml
    from accelerate.utils import set_seed
    from peft import LoraConfig
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from grpo_math import evaluate
    from grpo_math.generation.models import fast_dtype, load_tokenizer, model_path
    from grpo_math.problems.datasets import load_problems, to_dataset
    from grpo_math.rewards import load_reward
    from grpo_math.settings.shipped import find
    from grpo_math.trainer.config import MathGRPOConfig
    from grpo_math.trainer.trainer import MathGRPOTrainer

    own = yaml.safe_load(find("launch/configs/demo_cpu.yaml").read_text(encoding="utf-8"))
    own |= {"prompt_template": "gsm8k", "max_completion_length": 16}
    settings = {name: value for name, value in own.items() if name in GRPOConfig.__dataclass_fields__}
    settings["learning_rate"] = float(settings["learning_rate"])
    rows = settings["per_device_train_batch_size"]
    settings.update(
        output_dir=tempfile.mkdtemp() if not options.folder else f"{options.folder}/{options.trainer}",
        max_steps=options.steps,
        seed=options.seed,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=rows // options.micro_batch,
        log_completions=False,
        disable_tqdm=True,
        logging_strategy="no",
        model_init_kwargs={"dtype": fast_dtype()},
    )
    path = model_path(own["model_name_or_path"])
    problems = load_problems(own["dataset"], "train", template=own["prompt_template"], seed=options.seed)
    held_out = load_problems(own["dataset"], own["eval_split"], template=own["prompt_template"], limit=options.held_out)
    kind, config = (
        (GRPOTrainer, GRPOConfig(**settings))
        if options.trainer == "trl"
        else (MathGRPOTrainer, MathGRPOConfig(**settings, advantage_eps=1e-4))
    )
    tokenizer = load_tokenizer(path)
    set_seed(options.seed)  # the adapters start alike
    trainer: Any = kind(
        model=path,
        reward_funcs=[load_reward(name) for name in own["rewards"]],
        args=config,
        train_dataset=to_dataset(problems),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=own["lora_r"],
            lora_alpha=own["lora_alpha"],
            lora_dropout=own["lora_dropout"],
            target_modules=own["lora_target_modules"],
            task_type="CAUSAL_LM",
        ),
    )

    class Clock(TrainerCallback):
        """CPU seconds of training, and what is evaluated while it stands still."""

        def __init__(self) -> None:
            self.seconds, self.lines = 0.0, []

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.started = time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seconds += time.process_time() - self.started
            step = state.global_step
            if step == 1 and options.folder:
                weights = [p.detach().flatten().cpu() for p in kwargs["model"].parameters() if p.requires_grad]
                torch.save(torch.cat(weights), f"{options.folder}/{options.trainer}.pt")
            if step % EVERY and step > 1:
                return
            accuracy = None
            if step % EVERY == 0:
                accuracy = evaluate(
                    kwargs["model"],
                    held_out,
                    tokenizer=tokenizer,
                    max_new_tokens=config.max_completion_length,
                    batch_size=64,
                    progress=False,
                )["accuracy_in_format"]  # what the reward pays
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
            line = {"trainer": options.trainer, "step": step, "seconds": self.seconds, "accuracy": accuracy}
            print(json.dumps({**line, "peak_gb": peak}), flush=True)
            if accuracy is not None:
                self.lines.append(line)
                control.should_training_stop = reached(self.lines, options.target) is not None

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Clock())
    trainer.train()


def _difference(folder: Path) -> float:
    import torch

    trl, ours = (torch.load(folder / f"{kind}.pt") for kind in ("trl", "ours"))
    return ((ours - trl).norm() / trl.norm()).item()


if __name__ == "__main__":
    sys.exit(main())
