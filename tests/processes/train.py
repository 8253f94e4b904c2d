"""A few short trainings in each of several processes: torchrun or accelerate starts it, tests/launching.py says how.

train.py MODEL FOLDER RUNS, with RUNS = {"trl" or "ours": {"NAME": {setting: value}}} as JSON, writes for each run
FOLDER/KIND/NAME.pt, the trained weights, and on every rank FOLDER/KIND/NAME.RANK.json with what kind of launch it was
and a hash of that rank's weights.
"""

import hashlib
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock, patch

import torch
from datasets import Dataset
from peft import LoraConfig
from small_families import tiny_model
from small_generation import of_library
from small_trainers import KINDS, PROMPTS, SMALL, Evaluated, grades, letters, make, problems, sample_apart
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from transformers import AutoTokenizer

from grpo_math.algorithm.reference import _gathered
from grpo_math.packing import scoring
from grpo_math.packing.pack import Unpackable
from grpo_math.trainer import tiled_mlp

LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
LOGGED = ("loss", "reward", "ratio", "approx_kl")


def scattered(completions, **columns):
    """Most completions get the same reward, so that ranks have unequal work."""
    return [1.0 if "e" in text and len(text) % 2 else 0.0 for text in completions]


def scripted(prompts, trainer):
    """A `rollout_func`: the completions of a prompt at a step are the same in any number of processes."""
    tokenizer, seen, completions = trainer.processing_class, {}, []
    for prompt in prompts:
        seen[prompt] = seen.get(prompt, 0) + 1
        seed = trainer.state.global_step * 100_000 + seen[prompt] * 2_000 + sum(map(ord, prompt))
        generator = torch.Generator().manual_seed(seed)
        length = int(torch.randint(1, 7, (), generator=generator))
        completions.append(torch.randint(5, 40_000, (length,), generator=generator).tolist())
    prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}


def poison(trainer, step):
    """The last rank's loss is NaN in this optimizer step."""
    loss_of = trainer.grpo_math.updates.loss_of
    factors = {step: float("nan")} if trainer.accelerator.is_last_process else {}

    def poisoned(*args):
        computed = loss_of(*args)
        return computed._replace(loss=computed.loss * factors.get(trainer.state.global_step, 1.0))

    trainer.grpo_math.updates.loss_of = poisoned


# Reasons not to pack that the last rank alone may find.
UNPACKED = {
    "model": (scoring.attention, "unsupported", lambda *args: "no packed attention on this rank"),
    "layer": (scoring, "_check_calls", Mock(side_effect=Unpackable("a layer that is not packed on this rank"))),
    "log-probs": (scoring, "MAX_DIFF", -1.0),
}


class Saved(Evaluated):
    """``saved``: a hash of the weights at each checkpoint."""

    def __init__(self, rewards):
        super().__init__(rewards)
        self.saved = {}

    def on_save(self, args, state, control, model, **kwargs):
        self.saved[state.global_step] = digest(model)


def digest(model):
    """Of all weights, put together from the ranks where ZeRO-3 or FSDP2 has split them."""
    with _gathered(list(model.parameters()), writes=False):
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        return hashlib.sha256(b"".join(p.detach().float().numpy().tobytes() for p in whole)).hexdigest()


def zero(engine):
    """What DeepSpeed itself says of stage and offloading."""
    devices = [getattr(part, "device", None) for part in (engine.zero_offload_optimizer(), engine.zero_offload_param())]
    return [engine.zero_optimization_stage(), *("cpu" if "cpu" in str(device) else None for device in devices)]


# Options of this program; the others are settings of the trainer.
OPTIONS = {
    "rewards": "letters",
    "rows": "plain",
    "tile": 1024,
    "poisoned_step": None,
    "sampled_apart": False,
    "eval_rewards": (),
    "one_rank_unpacked": None,
    "lora": False,
    "family": None,  # of a tiny model instead of MODEL
    "checkpoint": None,  # to resume from, below FOLDER
}
OURS = ("max_tokens_per_micro_batch", "longest_first")  # settings that TRL does not have
ROWS = {
    "plain": [{"prompt": prompt} for prompt in PROMPTS * 4],
    "scripted": [{"prompt": f"{prompt}{n}"} for n in range(4) for prompt in PROMPTS],
    "graded": problems("ehm" * 12),
}


def train(kind, model, folder, name, given):
    options = {option: given.pop(option, default) for option, default in OPTIONS.items()}
    settings = {"max_steps": 3, "logging_steps": 1, **SMALL, **KINDS[kind], **given}
    if kind == "trl":
        settings = {setting: value for setting, value in settings.items() if setting not in OURS}
    rows, how = ROWS[options["rows"]], options["one_rank_unpacked"]
    tiled_mlp.MIN_TOKENS = options["tile"]
    with patch.object(*UNPACKED[how]) if how and os.environ["RANK"] == "1" else nullcontext():
        trainer = make(
            model=tiny_model(options["family"], vocab_size=49152) if options["family"] else model,
            tokenizer=AutoTokenizer.from_pretrained(model),
            folder=folder / name,
            rewards={"letters": letters, "sparse": scattered}[options["rewards"]],
            rows=rows,
            eval_dataset=Dataset.from_list(rows[:2]) if options["eval_rewards"] else None,
            peft_config=LORA if options["lora"] else None,
            rollout_func=scripted if options["rows"] == "scripted" else None,
            **settings,
        )
        trainer.add_callback(callback := Saved(options["eval_rewards"]))
        if options["rows"] == "graded":
            trainer.grpo_math.grader.grade = grades
        if options["sampled_apart"]:
            sample_apart(trainer)
        if options["poisoned_step"] is not None:
            poison(trainer, options["poisoned_step"])
        tokens, policy = [], trainer.accelerator.unwrap_model(trainer.model)
        policy.register_forward_pre_hook(
            of_library(
                lambda m, a, kwargs: tokens.append(kwargs["input_ids"].numel() if torch.is_grad_enabled() else 0)
            ),
            with_kwargs=True,
        )
        before = digest(policy)
        _fsdp_param_group.foreach_reduce.calls = 0
        trainer.train(resume_from_checkpoint=options["checkpoint"] and str(folder / options["checkpoint"]))
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    rank, lines = trainer.accelerator.process_index, [line for line in trainer.state.log_history if "loss" in line]
    queue = trainer.grpo_math.queue if kind == "ours" else None
    details = {
        "distributed_type": str(trainer.accelerator.distributed_type),
        "processes": trainer.accelerator.num_processes,
        "tokens": sum(tokens),
        "weights": digest(policy),
        "weights_before": before,
        "losses": [line["loss"] for line in lines],
        "logged": [[float(line[key]) for key in LOGGED if key in line] for line in lines],
        "kl": [float(line["kl"]) for line in lines if "kl" in line],
        "zero": None if trainer.deepspeed is None else zero(trainer.deepspeed),
        "resample": {key: value for line in lines for key, value in line.items() if "resample" in key},
        "skipped": [line["skipped"] for line in lines if "skipped" in line],
        "reduce_scatters": _fsdp_param_group.foreach_reduce.calls,  # fsdp_on_cpu.py counts
        "saved": callback.saved,
        "best": trainer.state.best_global_step,
        "position": queue.resampler.position if queue and queue.resampler else None,
    }
    (folder / f"{name}.{rank}.json").write_text(json.dumps(details))
    if rank == 0:
        torch.save({k: v.detach().float().cpu().clone() for k, v in state.items()}, folder / f"{name}.pt")
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    model, folder, kinds = sys.argv[1:]
    for kind, runs in json.loads(kinds).items():
        for name, given in runs.items():
            train(kind, model, Path(folder, kind), name, given)
