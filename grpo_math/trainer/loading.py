"""Load weights and optimizers from a checkpoint, where transformers loads too few weights or too many options."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import PartialState
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import PreTrainedModel

from grpo_math.run.bar import transformers_bars

# Options of an optimizer, which its state in a checkpoint contains too. ``initial_lr`` is the rate before the schedule.
OPTIONS = ("initial_lr", "weight_decay", "betas", "eps", "momentum")


def load_weights(model: PreTrainedModel, checkpoint: str) -> None:
    """Load all weights of a checkpoint, whose names are those on the Hub.

    transformers' trainer would leave out weights that have other names in the model, such as those of experts
    (huggingface/transformers#48805).
    """
    # The widest dtype loses nothing. A script may have cast single weights.
    dtype = max((parameter.dtype for parameter in model.parameters()), key=lambda dtype: dtype.itemsize)
    with transformers_bars(int(PartialState().is_main_process)):
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
    """Return the `OPTIONS` of each parameter group. An optimizer of DeepSpeed's settings has no groups at first."""
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
    # GreedyLR is in this module. Older versions of transformers lack the class.
    if isinstance(scheduler, LambdaLR | ReduceLROnPlateau) or type(scheduler).__module__ == "transformers.optimization":
        for group, values, rate in zip(optimizer.param_groups, options, scheduler._last_lr, strict=True):
            group.update(values, lr=rate)
