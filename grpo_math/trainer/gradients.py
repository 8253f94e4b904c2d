"""The gradients of an adapter in a place of their own.

Where backward makes them, they lie in what it has just freed: one in the place of each layer's input, which is then a
little too narrow for the next part's. The allocator must take that much anew: for 28 layers of a 7B model 0.85 GB. So
an optimizer step begins with one tensor for all of them, which goes when they do.

Does not change a value. Not for DDP, DeepSpeed and FSDP, which have places of their own, nor for full fine-tuning, for
which it has not been tried.
"""

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.nn import Parameter


class Places:
    """The gradient of each parameter is moved to its place, in one tensor for each dtype.

    >>> weights = [Parameter(torch.ones(2)), Parameter(torch.ones(3))]
    >>> places = Places(weights)
    >>> for _ in range(2):  # the second gradient is added where the first one lies
    ...     places.make()
    ...     sum((2 * weight).sum() for weight in weights).backward()
    >>> weights[1].grad, weights[1].grad.untyped_storage().nbytes()
    (tensor([4., 4., 4.]), 20)
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self.parameters = list(parameters)
        self.free: dict[int, Tensor] = {}  # places that no gradient has yet, by the parameter's number
        for number, parameter in enumerate(self.parameters):
            # Autograd has no way to say where a gradient is made, only a hook after it is there.
            parameter.register_post_accumulate_grad_hook(partial(self._move, number))

    def make(self) -> None:
        """Before the forward pass of a training step; of an optimizer step's second there are gradients."""
        if not torch.is_grad_enabled() or any(parameter.grad is not None for parameter in self.parameters):
            return
        # One tensor for each dtype: an allocation per parameter would fall into the holes that it is to avoid.
        of_kind = defaultdict[tuple[torch.device, torch.dtype], list[int]](list)
        for number, parameter in enumerate(self.parameters):
            of_kind[parameter.device, parameter.dtype].append(number)
        for (device, dtype), numbers in of_kind.items():
            sizes = [self.parameters[number].numel() for number in numbers]
            whole = torch.empty(sum(sizes), device=device, dtype=dtype)
            for number, slot in zip(numbers, whole.split(sizes), strict=True):
                self.free[number] = slot.view_as(self.parameters[number])

    def _move(self, number: int, parameter: Tensor) -> None:
        if parameter.grad is not None and (slot := self.free.pop(number, None)) is not None:
            parameter.grad = slot.copy_(parameter.grad)


def places_of(model: Any, *, alone: bool) -> Places:
    """Those of an adapter that one process trains ``alone``; else of nothing."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Places(trained if alone and is_peft_model(model) else [])
