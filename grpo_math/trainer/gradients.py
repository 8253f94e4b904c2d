"""Keep the gradients of an adapter in one buffer, against fragmentation of GPU memory.

The backward pass allocates each gradient in memory that it has just freed, such as a layer's saved input. The rest of
that block is too small for the input of the next micro-batch, so the allocator takes new memory: 0.85 GB for 28 layers
of a 7B model. So an optimizer step begins with one buffer for all gradients, which is freed together with them.

Does not change a value. Not used with DDP, DeepSpeed and FSDP, which have their own buffers, nor for full fine-tuning,
for which it was not measured.
"""

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.nn import Parameter

from grpo_math.errors import ConfigError

if TYPE_CHECKING:
    from grpo_math.trainer.trl_trainer import TrlTrainer


class FlatGradientBuffer:
    """Moves the gradient of each parameter into one buffer per dtype.

    >>> weights = [Parameter(torch.ones(2)), Parameter(torch.ones(3))]
    >>> buffer = FlatGradientBuffer(weights)
    >>> for _ in range(2):  # the second gradient is added to the first
    ...     buffer.allocate()
    ...     sum((2 * weight).sum() for weight in weights).backward()
    >>> weights[1].grad, weights[1].grad.untyped_storage().nbytes()
    (tensor([4., 4., 4.]), 20)
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self.parameters = list(parameters)
        self.free: dict[int, Tensor] = {}  # unused slots of the buffer, by the parameter's number
        for number, parameter in enumerate(self.parameters):
            # Autograd chooses where to allocate a gradient. It only has a hook after the allocation.
            parameter.register_post_accumulate_grad_hook(partial(self._move, number))

    def allocate(self) -> None:
        """Allocate the buffer before the first forward pass of an optimizer step, when there are no gradients."""
        if not torch.is_grad_enabled() or any(parameter.grad is not None for parameter in self.parameters):
            return
        # One tensor for each dtype: small allocations, one per parameter, would cause the fragmentation again.
        of_kind = defaultdict[tuple[torch.device, torch.dtype], list[int]](list)
        for number, parameter in enumerate(self.parameters):
            of_kind[parameter.device, parameter.dtype].append(number)
        for (device, dtype), numbers in of_kind.items():
            sizes = [self.parameters[number].numel() for number in numbers]
            buffer = torch.empty(sum(sizes), device=device, dtype=dtype)
            for number, slot in zip(numbers, buffer.split(sizes), strict=True):
                self.free[number] = slot.view_as(self.parameters[number])

    def _move(self, number: int, parameter: Tensor) -> None:
        # The first backward pass of a step fills the slot. Autograd adds later gradients to it in place.
        if parameter.grad is not None and (slot := self.free.pop(number, None)) is not None:
            parameter.grad = slot.copy_(parameter.grad)


def keep_gradients_of_4_bit(model: Any) -> None:
    """Keep bitsandbytes from repacking 4-bit weights in evaluation mode, which it does on a CPU with AVX512-BF16.

    The products with repacked weights have no gradient, also when the model is trained again.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def have_foreign_hooks(models: Iterable[Any]) -> bool:
    """Return True if something other than a buffer has hooks on gradients, such as a script's optimizer.

    >>> weight = torch.nn.Linear(1, 1)
    >>> _ = FlatGradientBuffer(weight.parameters())
    >>> have_foreign_hooks([weight])  # of another trainer of the same weights
    False
    >>> _ = weight.bias.register_post_accumulate_grad_hook(print)
    >>> have_foreign_hooks([weight])
    True
    """
    weights = (weight for model in models for weight in model.parameters())
    hooks = (hook for weight in weights for hook in (weight._post_accumulate_grad_hooks or {}).values())
    return any(getattr(getattr(hook, "func", None), "__func__", None) is not FlatGradientBuffer._move for hook in hooks)


def make_gradient_buffer(model: Any, *, is_single_process: bool) -> FlatGradientBuffer:
    """Return the buffer of an adapter that a single process trains, or else one without parameters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return FlatGradientBuffer(trained if is_single_process and is_peft_model(model) else [])


def has_unused_parameters(trainer: "TrlTrainer") -> bool:
    """Return True if DDP has to look for parameters without a gradient. It warns if it looks and finds none."""
    # Text leaves the vision tower of a model unused.
    unused = bool(set(trainer.model.config.sub_configs) - {"text_config"})
    kwargs = trainer.args.gradient_checkpointing_kwargs or {}
    reentrant = trainer.args.gradient_checkpointing and kwargs.get("use_reentrant")
    if (
        unused
        and reentrant
        and trainer.accelerator.num_processes > 1
        and all(p.requires_grad for p in trainer.model.parameters())
    ):
        raise ConfigError(
            "gradient_checkpointing_kwargs",
            kwargs,
            "DDP cannot train a model whose vision tower gets no gradient",
            "set use_reentrant to false",
        )
    return unused and not reentrant
