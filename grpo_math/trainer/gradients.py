"""The gradients of an adapter in a place of their own.

Where backward makes them, they lie in what it has just freed: one in the place of each layer's input, which is then a
little too narrow for the next part's. The allocator must take that much anew: for 28 layers of a 7B model 1 GB.

Does not change a value. Not for DDP, DeepSpeed and FSDP, which have places of their own, nor for full fine-tuning,
whose gradients would take their memory in generation, too.
"""

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.nn import Parameter


def set_aside(model: Any, *, alone: bool) -> None:
    """Where a process trains an adapter ``alone``."""
    if alone and is_peft_model(model):
        place([parameter for parameter in model.parameters() if parameter.requires_grad])


def place(parameters: Iterable[Parameter]) -> None:
    """From now on the gradient of each parameter is moved to its place, in one tensor for each dtype.

    >>> weights = [Parameter(torch.ones(2)), Parameter(torch.ones(3))]
    >>> place(weights)
    >>> for _ in range(2):  # the second gradient is added where the first one lies
    ...     sum((2 * weight).sum() for weight in weights).backward()
    >>> weights[1].grad, weights[1].grad.untyped_storage().nbytes()
    (tensor([4., 4., 4.]), 20)
    """
    of_kind = defaultdict[tuple[torch.device, torch.dtype], list[Parameter]](list)
    for parameter in parameters:
        of_kind[parameter.device, parameter.dtype].append(parameter)
    for (device, dtype), trained in of_kind.items():
        whole = torch.zeros(sum(parameter.numel() for parameter in trained), device=device, dtype=dtype)
        places = whole.split([parameter.numel() for parameter in trained])
        for parameter, own in zip(trained, places, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(_move, own.view_as(parameter)))


def _move(own: Tensor, parameter: Parameter) -> None:
    if parameter.grad is not None and parameter.grad is not own:
        own.copy_(parameter.grad)
        parameter.grad = own
