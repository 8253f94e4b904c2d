"""Find models that compute a position differently if the pass contains a later one.

A RoPE of type ``dynamic`` or ``longrope`` (Phi-3.5, Phi-4-mini) chooses its frequencies by the largest position of the
pass. TRL pads a rollout to one width, so all its passes have the same frequencies. Packed rows have different lengths,
so their frequencies would differ. The model is tried, because remote code may have another rule.

Does not find a rule in a model's own code that begins beyond ``max_position_embeddings``, unless a module without
parameters computes the positions, as in transformers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

FAR = 2**22  # a position beyond the context of any model

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@contextmanager
def recorded_calls(model: nn.Module) -> Iterator[list[Call]]:
    """Record the calls of modules without parameters, such as rotary embeddings."""
    calls: list[Call] = []
    modules = [module for module in model.modules() if next(module.parameters(), None) is None]
    hooks = [module.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def last_position_moved(model: nn.Module, position: int) -> Iterator[None]:
    """Give the last token of each pass another position."""

    def move(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "position_ids": _moved(kwargs["position_ids"], position)}

    hook = model.register_forward_pre_hook(move, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def reads_length(calls: list[Call]) -> bool:
    """Return True if a module returns other values for the same positions when the last position is `FAR`."""
    for module, args, kwargs in calls:
        if any(map(_is_positions, (*args, *kwargs.values()))):
            near, far = (_outputs(module, args, kwargs, moved) for moved in (False, True))
            if any(not torch.equal(a[..., :-1, :], b[..., :-1, :]) for a, b in zip(near, far, strict=False)):
                return True
    return False


def _outputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], moved: bool) -> list[Tensor]:
    """Call a copy of a module, because the call may change the module. Return nothing if the call fails."""

    def prepared(value: Any) -> Any:
        # On the CPU: an index beyond a table would end the whole process on a GPU.
        value = value.cpu() if isinstance(value, Tensor) else value
        return _moved(value, FAR) if moved and _is_positions(value) else value

    try:
        outputs = deepcopy(module).cpu()(*map(prepared, args), **{name: prepared(kwargs[name]) for name in kwargs})
    except (RuntimeError, IndexError):
        return []
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    return [output for output in outputs if isinstance(output, Tensor) and output.dim() > 1]


def _is_positions(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.dtype in (torch.int64, torch.int32)


def _moved(positions: Tensor, position: int) -> Tensor:
    positions = positions.clone()
    positions[..., -1] = position
    return positions
