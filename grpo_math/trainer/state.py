"""The state of a rank between two optimizer steps, beyond what transformers saves: ``state_RANK.pt``.

It contains the rollout that is being trained on, the position in it, the metrics of the next log line, and the state of
the trainer's parts. A killed run that is started again then ends with the weights, history and completions of a
run that was not killed: bitwise on a CPU in float32.

transformers saves the weights. reference.py saves the reference of the KL term.
"""

import random
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from transformers import TrainerCallback

from grpo_math.run.checkpoints import STATE, checkpoints
from grpo_math.run.stateful import Stateful
from grpo_math.settings.fields import fields
from grpo_math.system.collectives import agree_on_all, agree_on_largest, broadcast_from_main
from grpo_math.trainer import table

if TYPE_CHECKING:
    from trl import GRPOConfig

    from grpo_math.trainer.trl_trainer import TrlTrainer

# Attributes of TRL's and transformers' trainers, which neither of them saves.
ATTRIBUTES = (
    "_step",
    "_tr_loss",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "entropy_coef",
    "_last_world_entropy",
)


def in_rollout(trainer: "TrlTrainer") -> bool:
    """Return True if the next training step uses the rows of the current rollout."""
    return bool(trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations))


@dataclass(eq=False)
class TrainerAttributes(Stateful):
    """The state of TRL's and transformers' trainers, which neither of them saves."""

    trainer: "TrlTrainer"
    settings: "GRPOConfig"

    def state_dict(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            # A copy, because transformers adds the next loss to `_tr_loss` in place.
            **{name: deepcopy(getattr(trainer, name)) for name in ATTRIBUTES},
            # Between two rollouts there is nothing to save: the next step samples.
            "rollout": (trainer._buffered_inputs or []) if in_rollout(trainer) else None,
            "batch_settings": self._batch_settings(),
            "evaluates": trainer.control.should_evaluate,
            "metrics": {name: list(values) for name, values in trainer._metrics["train"].items()},
            "table": table.copied_columns(trainer._logs),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer = self.trainer
        for name in ATTRIBUTES:
            setattr(trainer, name, state[name])
        # transformers divides the sum of all losses, which is restored, by the steps since this one.
        trainer._initial_global_step = 0
        now = self._batch_settings()
        fits = all(now.get(name) == value for name, value in state["batch_settings"].items())
        trainer._buffered_inputs = (state["rollout"] or None) if fits else None
        trainer.control.should_evaluate = state["evaluates"]
        trainer._metrics["train"].clear()
        trainer._metrics["train"].update(state["metrics"])
        table.restore(trainer._logs, state["table"])

    def _batch_settings(self) -> dict[str, Any]:
        names = ("world_size", *(name for name, field in fields().items() if field.facts.get("shapes_rollout")))
        return {name: getattr(self.settings, name) for name in names}


@dataclass(eq=False)
class RunState:
    """The state of a rank, collected from the objects that own it; and the snapshot of the last complete step.

    ``flat``: objects whose entries are at the top level of a checkpoint. ``named``: objects that have an entry there.
    """

    trainer: "TrlTrainer"
    flat: list[Any]
    named: Mapping[str, Stateful]
    # A snapshot of the last complete step, for a run that fails in the next one.
    last_step: dict[str, Any] | None = None
    saved_step: int = 0  # the step of the last checkpoint, or 0
    loaded: dict[str, Any] | None = None  # from the checkpoint that this run resumes from

    def state_dict(self) -> dict[str, Any]:
        state = {name: owner.state_dict() for name, owner in self.named.items()}
        for owner in self.flat:
            state |= owner.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for owner in self.flat:
            owner.load_state_dict(state)
        for name, owner in self.named.items():
            owner.load_state_dict(state.get(name, {}))

    def agree_on_saved(self, writes_table: bool) -> dict[str, Any]:
        """Return the state for a checkpoint. All ranks wait for completions that servers are still sampling."""
        # Checkpoints are read with ``weights_only=True``, which accepts only plain types and tensors.
        saved = self.state_dict()
        # Only the main process writes the table.
        writes_table &= self.trainer.accelerator.is_main_process
        saved["table"] = table.as_json(saved["table"]) if writes_table else None
        if agree_on_largest(saved.setdefault("asked") is not None):
            broadcast_from_main(lambda: saved["asked"] and saved["asked"].wait())
            saved["asked"] = saved["asked"] and saved["asked"].state_dict()
        return saved

    def take_snapshot(self) -> None:
        """Keep the state of the step that was just completed, for `_restore_last_step`. Nothing is converted here."""
        self.last_step = {
            **self.state_dict(),
            "step": self.trainer.state.global_step,
            "tokens": self.trainer.state.num_input_tokens_seen,
            "python": random.getstate(),
            "numpy": numpy.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        }

    def take_missing_snapshot(self) -> None:
        """Remember the completed step, unless it has a snapshot or a checkpoint."""
        # Never a second snapshot of a step: the next step may be under way.
        if self.trainer.state.global_step not in (self.saved_step, self.last_step and self.last_step["step"]):
            self.take_snapshot()

    def _restore_last_step(self) -> bool:
        """Return to the last complete step, if it has a snapshot and no checkpoint."""
        state, last = self.trainer.state, self.last_step
        # Without a snapshot of this step, the state belongs to another step than the weights.
        if not last or not last["step"] == state.global_step != self.saved_step:
            return False
        # The step under way has drawn random numbers, counted tokens and filled the table.
        self.load_state_dict(last)
        state.num_input_tokens_seen = last["tokens"]
        random.setstate(last["python"])
        numpy.random.set_state(last["numpy"])
        torch.set_rng_state(last["torch"])
        if last["cuda"] is not None:
            torch.cuda.set_rng_state(last["cuda"])
        return True

    def agree_to_save_last_step(self, is_recipe_run: bool) -> str:
        """Save the checkpoint that the last complete step would have given. Return the end of an error's line."""
        trainer = self.trainer
        # A script that saves nothing gets no checkpoint of the step before a failed one. A step whose evaluation has
        # failed is complete.
        saves = is_recipe_run or trainer.args.save_strategy != "no" or trainer.control.should_evaluate
        if saves and self._restore_last_step():
            trainer._save_checkpoint(trainer.model, trial=None)
        # torch's agent ends all processes when the first one exits.
        trainer.accelerator.wait_for_everyone()
        name = f"checkpoint-{trainer.state.global_step}"
        if name not in [path.name for _, path in checkpoints(Path(str(trainer.args.output_dir)))]:
            return ""
        return f" ({name} is saved: {how_to_continue(is_recipe_run)} continues from it)"


def how_to_continue(is_recipe_run: bool) -> str:
    return "the same command" if is_recipe_run else "train(resume_from_checkpoint=True)"


class RestoreState(TrainerCallback):
    """Loads the state of a checkpoint when transformers has reset its attributes, before any evaluation."""

    def __init__(self, run: RunState) -> None:
        self.run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.run.loaded is not None:
            self.run.load_state_dict(self.run.loaded)
            self.run.loaded = None


def agree_on_state(checkpoint: Path, rank: int, device: Any) -> dict[str, Any] | None:
    """Return the state of this rank in a checkpoint; None if any rank has no state there.

    All ranks call this, and agree: a rank without a rollout would sample while the others train.
    """
    # `torch.load` does not support ``cpu:0``, the name of the device under DeepSpeed.
    map_location = torch.device("cpu") if device.type == "cpu" else device
    own_path, first_path = checkpoint / STATE.format(rank), checkpoint / STATE.format(0)
    path = next((path for path in (own_path, first_path) if path.exists()), None)
    state = torch.load(path, map_location=map_location, weights_only=True) if path else None
    # Without a file of this rank, fewer processes wrote the checkpoint. Between two rollouts the state of rank 0 is
    # enough.
    if path != own_path and state and state["rollout"] is not None:
        state = None
    return state if agree_on_all(state is not None) else None
