"""The state of a rank between two optimizer steps, beyond what transformers saves: ``state_RANK.pt``.

It contains the rollout that is being trained on, the position in it, the metrics of the next log line, and the state of
each collaborator of the trainer. A killed run that is started again then ends with the weights, history and completions
of a run that was not killed: bitwise on a CPU in float32.

transformers saves the weights. reference.py saves the reference of the KL term.
"""

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy, deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from accelerate.utils import gather_object
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import PreTrainedModel

from grpo_math.generation.prefetch import PrefetchedRollout
from grpo_math.packing.micro_batches import TrainingStep
from grpo_math.run.checkpoints import STATE, checkpoints
from grpo_math.run.ranks import broadcast_from_main
from grpo_math.trainer.console import one_loading_bar
from grpo_math.trainer.table import plain, storable

if TYPE_CHECKING:
    from grpo_math.trainer.trainer import MathGRPOTrainer

# Attributes of TRL's and transformers' trainers, which neither of them saves.
ATTRIBUTES = (
    "_step",
    "_tr_loss",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "entropy_coef",
    "_last_world_entropy",
)
# Attributes of the trainer's collaborators. Existing checkpoints contain these names.
COLLABORATORS = {
    "meter": ("rollout_tokens", "tokens_per_step"),
    "nonfinite": ("in_a_row",),
    "budget": ("halved_to",),
    "resampler": ("position",),
    "unsolved": ("position", "shares", "next"),
}
# Options of an optimizer, which its state in a checkpoint contains too. ``initial_lr`` is the rate before the schedule.
OPTIONS = ("initial_lr", "weight_decay", "betas", "eps", "momentum")
LISTS = ("prompt", "completion", "advantages")  # of the table of completions
DICTS = ("rewards", "extra")
# A half-trained rollout fits only these settings. With others (resume=force) it is sampled again.
# ``beta``, because a rollout without a KL term has no log-probs of the reference. The last ones decide if its
# micro-batches may be split, and if a completion without an advantage may be skipped.
BATCH_SETTINGS = (
    *("gradient_accumulation_steps", "steps_per_generation", "num_iterations", "per_device_train_batch_size"),
    *("num_generations", "beta", "loss_type", "world_size"),
    *("entropy_coef", "use_adaptive_entropy", "top_entropy_quantile", "router_aux_loss_coef", "surrogate"),
)


def rank_state(trainer: "MathGRPOTrainer") -> dict[str, Any]:
    """Return what `restore` needs; after `agree_on_saved_state`, in plain types and tensors."""
    logs, generation = trainer.table, getattr(trainer, "vllm_generation", None)
    table: dict[str, Any] = {name: list(logs[name]) for name in LISTS}
    # A column of a script may contain what JSON cannot represent.
    table |= {name: {key: storable(values) for key, values in logs[name].items()} for name in DICTS}
    rollout = [step.state_dict() if isinstance(step, TrainingStep) else step for step in trainer._buffered_inputs or ()]
    return {
        # A copy, because transformers adds the next loss to `_tr_loss` in place.
        **{name: deepcopy(getattr(trainer, name)) for name in ATTRIBUTES},
        **{
            name: {key: copy(getattr(part, key)) for key in COLLABORATORS[name]}
            for name, part in _collaborators(trainer).items()
        },
        # Between two rollouts there is nothing to save: the next step samples.
        "rollout": rollout if trainer.in_rollout else None,
        "batch_settings": [getattr(trainer.settings, name) for name in BATCH_SETTINGS],
        "sampled": getattr(generation, "rollouts", 0),
        "asked": getattr(generation, "prefetched", None),
        "evaluates": trainer.control.should_evaluate,
        "metrics": {name: list(values) for name, values in trainer.step_metrics.items()},
        "table": json.dumps(table, default=plain) if trainer.writes_completions else None,
    }


def _collaborators(trainer: "MathGRPOTrainer") -> dict[str, Any]:
    """Return the objects that have a state, by their names in a checkpoint."""
    return {name: part for name in COLLABORATORS if (part := getattr(trainer, name)) is not None}


def agree_on_saved_state(trainer: "MathGRPOTrainer") -> dict[str, Any]:
    """Return `rank_state` for a checkpoint. Every process waits for the completions that servers are still sampling."""
    # Checkpoints are read with ``weights_only=True``, which accepts only plain types and tensors.
    saved = rank_state(trainer)
    if trainer.settings.staleness:
        broadcast_from_main(lambda: saved["asked"] and saved["asked"].wait())
        saved["asked"] = saved["asked"] and saved["asked"].state_dict()
    return saved


def agree_on_state(checkpoint: Path, rank: int, device: Any) -> dict[str, Any] | None:
    """Read a `rank_state` from a checkpoint; None if a rank has none.

    All ranks call this together, and agree: a rank without a rollout would sample while the others train.
    """
    # `torch.load` does not support ``cpu:0``, the name of the device under DeepSpeed.
    at = torch.device("cpu") if device.type == "cpu" else device
    of_rank, first = checkpoint / STATE.format(rank), checkpoint / STATE.format(0)
    path = next((path for path in (of_rank, first) if path.exists()), None)
    state = torch.load(path, map_location=at, weights_only=True) if path else None
    # Fewer processes wrote the checkpoint. Between two rollouts rank 0 has what any rank needs.
    if path != of_rank and state and state["rollout"] is not None:
        state = None
    return state if all(gather_object([state is not None])) else None


def restore(trainer: "MathGRPOTrainer", state: Mapping[str, Any], position: int = 0) -> None:
    """Put `rank_state` back into a trainer.

    ``position``: the training steps of this epoch that are done, which is the position of the data loader.
    """
    for name in ATTRIBUTES:
        setattr(trainer, name, state[name])
    for name, part in _collaborators(trainer).items():
        # resume=force may switch on resampling.
        for key, value in state.get(name, {}).items():
            setattr(part, key, copy(value))
    # transformers divides the sum of all losses, which is restored, by the steps since this one.
    trainer._initial_global_step = 0
    # Rows of TRL have no micro-batches.
    steps = [TrainingStep.from_state_dict(step) if "micro_batches" in step else step for step in state["rollout"] or ()]
    trainer._buffered_inputs = steps or None
    if state["batch_settings"] != [getattr(trainer.settings, name) for name in BATCH_SETTINGS]:
        # TRL then samples at once. It selects rows by ``_step``, which must agree with the data loader.
        trainer._buffered_inputs = None
        trainer._step = position
    if hasattr(getattr(trainer, "vllm_generation", None), "rollouts"):
        trainer.vllm_generation.rollouts = state["sampled"]
        # The object itself, if this is the state of a moment and not of a checkpoint.
        batch = state["asked"]
        trainer.vllm_generation.prefetched = (
            PrefetchedRollout.from_state_dict(batch) if isinstance(batch, dict) else batch
        )
    trainer.control.should_evaluate = state["evaluates"]
    trainer.step_metrics.clear()
    trainer.step_metrics.update(state["metrics"])
    if state["table"]:
        table, logs = json.loads(state["table"]), trainer.table
        for name in LISTS:
            # Into TRL's own columns, which keep only the rows of the last rollout.
            logs[name].extend(table[name])
        for name in DICTS:
            logs[name].clear()
            for key, values in table[name].items():
                logs[name][key].extend(values)


def load_weights(model: PreTrainedModel, checkpoint: str) -> None:
    """Load all weights of a checkpoint, whose names are those on the Hub.

    transformers' trainer would leave out weights that have other names in the model, such as those of experts
    (huggingface/transformers#48805).
    """
    # The widest dtype loses nothing. A script may have cast single weights.
    dtype = max((parameter.dtype for parameter in model.parameters()), key=lambda dtype: dtype.itemsize)
    with one_loading_bar():
        loaded = type(model).from_pretrained(checkpoint, dtype=dtype)
    model.load_state_dict(loaded.state_dict())


@contextmanager
def unchanged_dtypes(model: torch.nn.Module) -> Iterator[None]:
    """Keep the dtypes of the trained weights while a checkpoint is loaded into them.

    peft turns an adapter that it loads into float32, and TRL trains the adapter of a quantised base in bfloat16.
    """
    dtypes = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    yield
    for name, parameter in model.named_parameters():
        if parameter.dtype != dtypes.get(name, parameter.dtype):
            parameter.data = parameter.data.to(dtypes[name])


def optimizer_options(optimizer: Any) -> list[dict[str, Any]]:
    """Return the `OPTIONS` of each parameter group. An optimizer in DeepSpeed's settings has none at first."""
    groups = getattr(optimizer, "param_groups", [])
    return [{name: group[name] for name in OPTIONS if name in group} for group in groups]


def set_options(optimizer: Any, scheduler: Any, options: list[dict[str, Any]]) -> None:
    """Set the options of each parameter group after a checkpoint was loaded, and the learning rate of the next step.

    The checkpoint may have other options (resume=force). A schedule by a metric has changed the rate itself, so the
    rate stays that of the checkpoint. Changes nothing with other schedules of a script, which may have changed any
    option.
    """
    scheduler = getattr(scheduler, "scheduler", scheduler)  # in accelerate's wrapper
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = [group["initial_lr"] for group in options]
        factors = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        scheduler._last_lr = [rate * factor(scheduler.last_epoch) for rate, factor in factors]
    # The module is that of GreedyLR, which older versions of transformers lack.
    if isinstance(scheduler, LambdaLR | ReduceLROnPlateau) or type(scheduler).__module__ == "transformers.optimization":
        for group, values, rate in zip(optimizer.param_groups, options, scheduler._last_lr, strict=True):
            group.update(values, lr=rate)


def snapshot(trainer: "MathGRPOTrainer") -> dict[str, Any]:
    """Return `rank_state` and what transformers saves elsewhere.

    `agree_to_save_last_step` writes it if the next step fails.
    """
    return {
        **rank_state(trainer),
        "step": trainer.state.global_step,
        "tokens": trainer.state.num_input_tokens_seen,
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def remember_step(trainer: "MathGRPOTrainer") -> None:
    """Take the snapshot of a step that has just been completed, unless the step has a snapshot or a checkpoint."""
    # Never a second one: the next step may be under way.
    if trainer.state.global_step not in (trainer.saved_step, trainer.last_step and trainer.last_step["step"]):
        trainer.last_step = snapshot(trainer)


def agree_to_save_last_step(trainer: "MathGRPOTrainer") -> str:
    """Save the checkpoint that the last complete step would have given. Return the end of an error's line: its name."""
    step, then = trainer.state.global_step, trainer.last_step
    # A script that saves nothing gets no checkpoint of the step before a failed one. A step whose evaluation has failed
    # is complete.
    saves = trainer.of_recipe or trainer.args.save_strategy != "no" or trainer.control.should_evaluate
    # Without a snapshot of this step, the state of the trainer belongs to another step than its weights.
    if saves and then and then["step"] == step != trainer.saved_step:
        # The step under way has drawn random numbers, counted tokens and filled the table.
        restore(trainer, then)
        trainer.state.num_input_tokens_seen = then["tokens"]
        random.setstate(then["python"])
        numpy.random.set_state(then["numpy"])
        torch.set_rng_state(then["torch"])
        if then["cuda"] is not None:
            torch.cuda.set_rng_state(then["cuda"])
        trainer._save_checkpoint(trainer.model, trial=None)
    # torch's agent ends all processes when the first one exits.
    trainer.accelerator.wait_for_everyone()
    name = f"checkpoint-{step}"
    if name not in [path.name for _, path in checkpoints(Path(str(trainer.args.output_dir)))]:
        return ""
    return f" ({name} is saved: {how_to_continue(trainer)} continues from it)"


def how_to_continue(trainer: "MathGRPOTrainer") -> str:
    return "the same command" if trainer.of_recipe else "train(resume_from_checkpoint=True)"
