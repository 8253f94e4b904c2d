"""A few short trainings in each of several processes: torchrun or accelerate starts it, tests/launching.py says how.

train.py trl|ours MODEL FOLDER SETTINGS.json -> FOLDER/NAME.pt for each {"NAME": {setting: value}}: the trained weights,
and on every rank FOLDER/NAME.RANK.json with what kind of launch it was and a hash of that rank's weights.
"""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig
from small_trainers import PROMPTS, SMALL, config, letters, sample_apart
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_math.grading import Grade, Verdict
from grpo_math.trainer import scoring, tiled_mlp
from grpo_math.trainer.config import MathGRPOConfig
from grpo_math.trainer.packing import Unpackable
from grpo_math.trainer.reference import _whole
from grpo_math.trainer.trainer import MathGRPOTrainer

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


def grades(rows, completions):
    """e: all right, h: all wrong, m: right and wrong in turn."""
    right = [row["answer"] == "e" or (row["answer"] == "m" and i % 2) for i, row in enumerate(rows)]
    verdicts = [Verdict.CORRECT if yes else Verdict.WRONG for yes in right]
    return [Grade(verdict, None, in_format=False, reason="") for verdict in verdicts]


def poison(trainer, step):
    """The last rank's loss is NaN in this optimizer step."""
    loss_of, last = trainer._loss_of, trainer.accelerator.num_processes - 1

    def loss(model, rows):
        bad = trainer.state.global_step == step and trainer.accelerator.process_index == last
        return loss_of(model, rows) * (float("nan") if bad else 1.0)

    trainer._loss_of = loss


def unpackable(*args):
    raise Unpackable("a layer that is not packed on this rank")


UNPACKED = {
    "model": (scoring.attention, "unsupported", lambda *args: "no packed attention on this rank"),
    "layer": (scoring.PackedScorer, "_count", unpackable),
    "log-probs": (scoring, "MAX_LOGPROB_DIFF", -1.0),
}


@contextmanager
def last_rank_unpacked(how):
    """The last rank alone finds a reason not to pack. If the others wait for it, the run ends after a minute."""
    patched = pytest.MonkeyPatch()
    if how:
        distributed_c10d._set_pg_timeout(timedelta(seconds=60))
        if PartialState().is_last_process:
            patched.setattr(*UNPACKED[how])
    yield
    patched.undo()


class Evaluated(TrainerCallback):
    """Each evaluation gets the next of these rewards. ``saved``: a hash of the weights at each checkpoint."""

    def __init__(self, rewards):
        self.rewards, self.saved = iter(rewards), {}

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_reward"] = next(self.rewards)  # transformers reads the same dict afterwards

    def on_save(self, args, state, control, model, **kwargs):
        self.saved[state.global_step] = digest(model)


def digest(model):
    """Of all weights, put together from the ranks where ZeRO-3 or FSDP2 has split them."""
    with _whole(list(model.parameters()), writes=False):
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        return hashlib.sha256(b"".join(p.detach().float().numpy().tobytes() for p in whole)).hexdigest()


def zero(engine):
    """What DeepSpeed itself says of stage and offloading."""
    devices = [getattr(part, "device", None) for part in (engine.zero_offload_optimizer(), engine.zero_offload_param())]
    return [engine.zero_optimization_stage(), *("cpu" if "cpu" in str(device) else None for device in devices)]


# Options of this program; the others are settings of the trainer.
OPTIONS = {
    "rewards": "letters",
    "tile": 1024,
    "poisoned_step": None,
    "sampled_apart": False,
    "eval_rewards": (),
    "one_rank_unpacked": None,
    "lora": False,
    "scripted": False,
}
OURS = ("max_tokens_per_micro_batch", "longest_first")  # settings that TRL does not have


def main(kind: str, model: str, folder: str, settings: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    for name, given in json.loads(settings).items():
        options = {option: given.pop(option, default) for option, default in OPTIONS.items()}
        tiled_mlp.MIN_TOKENS, evaluated = options["tile"], Evaluated(options["eval_rewards"])
        resampled, rollout_func = "resample_groups" in given, scripted if options["scripted"] else None
        if kind == "trl":
            trainer_class, config_class, extra = GRPOTrainer, GRPOConfig, {}
            given = {setting: value for setting, value in given.items() if setting not in OURS}
        else:
            trainer_class, config_class, extra = MathGRPOTrainer, MathGRPOConfig, {"advantage_eps": 1e-4}
        rows = [{"prompt": f"{prompt}{n if rollout_func else ''}"} for n in range(4) for prompt in PROMPTS]
        if resampled:
            rows = [{"prompt": f"{kind} {i} plus", "answer": kind} for i, kind in enumerate("ehm" * 12)]
        base = {"max_steps": 3, "logging_steps": 1, **SMALL, **extra}
        arguments = config(config_class, Path(folder) / name, **{**base, **given})  # starts the process group
        faults = ExitStack()
        faults.enter_context(last_rank_unpacked(options["one_rank_unpacked"]))
        trainer = trainer_class(
            model=model,
            reward_funcs=scattered if options["rewards"] == "sparse" else letters,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows[:2]) if arguments.do_eval else None,
            processing_class=tokenizer,
            peft_config=LORA if options["lora"] else None,
            callbacks=[evaluated],
            rollout_func=rollout_func,
        )
        if resampled:
            trainer._grade = grades
        if options["sampled_apart"]:
            sample_apart(trainer)
        if options["poisoned_step"] is not None:
            poison(trainer, options["poisoned_step"])
        tokens = [0]
        model_ = trainer.accelerator.unwrap_model(trainer.model)
        model_.register_forward_pre_hook(
            lambda m, a, kwargs, seen=tokens: seen.append(
                kwargs["input_ids"].numel() if torch.is_grad_enabled() else 0
            ),
            with_kwargs=True,
        )
        before = digest(model_)
        with faults:
            trainer.train()
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        rank, history = trainer.accelerator.process_index, trainer.state.log_history
        details = {
            "distributed_type": str(trainer.accelerator.distributed_type),
            "processes": trainer.accelerator.num_processes,
            "tokens": sum(tokens),
            "weights": digest(model_),
            "weights_before": before,
            "losses": [line["loss"] for line in history if "loss" in line],
            "logged": [[float(line[key]) for key in LOGGED if key in line] for line in history if "loss" in line],
            "zero": None if trainer.deepspeed is None else zero(trainer.deepspeed),
            "resample": {k: v for line in history for k, v in line.items() if "resample" in k},
            "skipped": [line["skipped"] for line in history if "skipped" in line],
            "reduce_scatters": getattr(_fsdp_param_group.foreach_reduce, "calls", None),  # fsdp_on_cpu.py counts
            "saved": evaluated.saved,
            "best": trainer.state.best_global_step,
            "position": trainer.resampler.pool.position if getattr(trainer, "resampler", None) else None,
        }
        (Path(folder) / f"{name}.{rank}.json").write_text(json.dumps(details))
        if rank == 0:
            torch.save({k: v.detach().float().cpu().clone() for k, v in state.items()}, Path(folder) / f"{name}.pt")
        trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(*sys.argv[1:])
