"""What a rank has in memory between two optimizer steps, beyond what transformers saves: ``state_RANK.pt``.

The rollout that is being trained on, where training stands in it, and what the next line of the log is a mean of. A
killed run, started again, then ends with the weights, history and completions of one that was not: bitwise on a CPU in
float32.

Does not save or load weights: transformers does, and reference.py for the reference of the KL term.
"""

import json
import random
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate.utils import gather_object

from grpo_math.generation.prefetch import Prefetch
from grpo_math.run.checkpoints import STATE
from grpo_math.run.main_process import on_main

# Attributes of TRL's and transformers' trainers.
HELD = ("_step", "_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_last_world_entropy")
LISTS = ("prompt", "completion", "advantages")  # of the table of completions
DICTS = ("rewards", "extra")
# What a rollout that is half trained on was cut for: with others (resume=force) it is drawn again.
CUT_FOR = (
    *("gradient_accumulation_steps", "steps_per_generation", "num_iterations", "per_device_train_batch_size"),
    *("num_generations", "beta"),
)


def state_of(trainer: Any) -> dict[str, Any]:
    """What `go_on` needs; with `to_keep`, of plain types and tensors."""
    args, logs = trainer.args, trainer._logs
    # Between two rollouts there is nothing to keep: the next step samples.
    in_rollout = trainer._step % (args.steps_per_generation * trainer.num_iterations) != 0
    table: dict[str, Any] = {name: list(logs[name]) for name in LISTS}
    table |= {name: {key: list(values) for key, values in logs[name].items()} for name in DICTS}
    return {
        **{name: deepcopy(getattr(trainer, name)) for name in HELD},  # what comes next is added to them in place
        "_rollout_tokens": list(trainer.meter.rollout_tokens),
        "_tokens_per_step": trainer.meter.tokens_per_step,
        "rollout": trainer._buffered_inputs if in_rollout else None,
        "cut_for": [getattr(args, name) for name in CUT_FOR],
        "nonfinite": trainer._nonfinite.in_a_row,
        "budget": trainer.budget.halved_to,
        "pool": trainer._resampler.pool.position if trainer._resampler is not None else 0,
        "sampled": getattr(getattr(trainer, "vllm_generation", None), "rollouts", 0),
        "asked": getattr(getattr(trainer, "vllm_generation", None), "asked", None),
        "metrics": {name: list(values) for name, values in trainer._metrics["train"].items()},
        "table": json.dumps(table, default=_plain) if trainer.log_completions else None,
    }


def to_keep(trainer: Any) -> dict[str, Any]:
    """`state_of` as a checkpoint keeps it, which is read with ``weights_only=True``: what is asked of servers is waited
    for, by every process."""
    held = state_of(trainer)
    if trainer.settings.staleness:
        on_main(lambda: held["asked"] and held["asked"].wait())
        held["asked"] = held["asked"] and held["asked"].state_dict()
    return held


def _plain(value: Any) -> Any:
    """A number of numpy or torch, which a reward function may have logged, as Python's; anything else as text."""
    return value.item() if getattr(value, "size", None) == 1 or getattr(value, "ndim", None) == 0 else str(value)


def read(checkpoint: Path, rank: int, device: Any) -> dict[str, Any] | None:
    """Return what `state_of` gave, from a checkpoint; None if it has none.

    All ranks call this together. A rank without a rollout would sample while the others train.
    """
    at = torch.device("cpu") if device.type == "cpu" else device  # torch.load knows no cpu:0, which DeepSpeed says
    own, first = checkpoint / STATE.format(rank), checkpoint / STATE.format(0)
    state = None
    if own.exists():
        state = torch.load(own, map_location=at, weights_only=True)
    elif first.exists():
        # Fewer processes wrote the checkpoint. Between two rollouts rank 0 has what any rank needs.
        state = torch.load(first, map_location=at, weights_only=True)
        state = state if state["rollout"] is None else None
    return state if all(gather_object([state is not None])) else None


def go_on(trainer: Any, state: Mapping[str, Any], position: int = 0) -> None:
    """Put back what `state_of` has read. Called when transformers has set its own attributes to zero.

    ``position``: the training steps of this epoch that are done, which is where the data are.
    """
    for name in HELD:
        setattr(trainer, name, state[name])
    trainer.meter.rollout_tokens, trainer.meter.tokens_per_step = state["_rollout_tokens"], state["_tokens_per_step"]
    trainer._buffered_inputs = state["rollout"]
    # With another batch size the half-trained rollout cannot go on; it is sampled again from the same prompts.
    if state["cut_for"] != [getattr(trainer.args, name) for name in CUT_FOR]:
        trainer._buffered_inputs, trainer._step = None, position
    trainer._nonfinite.in_a_row = state["nonfinite"]
    if state["budget"] is not None:
        trainer.budget.halved_to = trainer.budget.tokens = state["budget"]
    if trainer._resampler is not None:
        trainer._resampler.pool.position = state["pool"]
    if hasattr(getattr(trainer, "vllm_generation", None), "rollouts"):
        trainer.vllm_generation.rollouts = state["sampled"]
        asked = state["asked"]  # the object itself, if this is the state of a moment and not of a checkpoint
        trainer.vllm_generation.asked = Prefetch.from_state_dict(asked) if isinstance(asked, dict) else asked
    trainer._metrics["train"].clear()
    trainer._metrics["train"].update(state["metrics"])
    if state["table"]:
        table, logs = json.loads(state["table"]), trainer._logs
        for name in LISTS:
            logs[name].clear()
            logs[name].extend(table[name])
        for name in DICTS:
            logs[name].clear()
            for key, values in table[name].items():
                logs[name][key].extend(values)


def moment(trainer: Any) -> dict[str, Any]:
    """`state_of`, and what a checkpoint keeps elsewhere: for `save_last_step`, when the next step has failed."""
    return {
        **state_of(trainer),
        "tokens": trainer.state.num_input_tokens_seen,
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def save_last_step(trainer: Any) -> None:
    """A checkpoint as it would have been before the step that is under way, which has drawn random numbers."""
    # None: no step was done since the run started, or went on from a checkpoint.
    if (then := trainer._last_step) and trainer.saved_step != trainer.state.global_step:
        # The step under way has drawn random numbers, counted tokens and filled the table.
        go_on(trainer, then)
        trainer.state.num_input_tokens_seen = then["tokens"]
        random.setstate(then["python"])
        numpy.random.set_state(then["numpy"])
        torch.set_rng_state(then["torch"])
        if then["cuda"] is not None:
            torch.cuda.set_rng_state(then["cuda"])
        trainer._save_checkpoint(trainer.model, trial=None)
    trainer.accelerator.wait_for_everyone()  # torch's agent ends the others with the first


def saved_before(trainer: Any, error: Exception) -> str:
    """`save_last_step`, for a run that cannot go on; the error with where the checkpoint is."""
    save_last_step(trainer)
    if not trainer.state.global_step:
        return str(error)
    return f"{error} (checkpoint-{trainer.state.global_step} is saved: the same command goes on from it)"
