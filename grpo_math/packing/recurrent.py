"""Compute layers with a state in packed rows (linear attention, state-space layers, short convolutions).

A group's prompt is computed once, and each completion continues from the state at the prompt's end. Such a layer reads
its states from a cache, as it does in generation. Our cache, `States`, keeps the autograd graph: so the gradient at the
prompt is the sum over its completions. The completions of a group run as one batch, padded at their ends, which a
causal layer does not read.

A layer that continues a state only one token at a time would give wrong log-probs. The comparison with TRL's log-probs
before the first update finds such a model (`scoring.PackedScorer.agree_to_pack`).
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from inspect import signature, unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from grpo_math.generation.names import cache_name
from grpo_math.packing.pack import GroupLayout, Unpackable


class States:
    """The cache of one layer: states by number, each (batch, ...). It is empty before the first update."""

    def __init__(self) -> None:
        self.conv_states: dict[int, Tensor] = {}  # the last inputs of a convolution
        self.recurrent_states: dict[int, Tensor] = {}

    def repeated(self, times: int) -> "States":
        """Return a prompt's states, repeated for a batch."""
        other = States()
        other.conv_states = {i: state.repeat_interleave(times, dim=0) for i, state in self.conv_states.items()}
        other.recurrent_states = {
            i: state.repeat_interleave(times, dim=0) for i, state in self.recurrent_states.items()
        }
        return other

    def is_recording_past(self, layer: int) -> bool:
        return True  # if False, a layer would compute a single token by writing into its states

    # Before transformers 5.23 a layer reads these attributes of its cache: ``layers[i].recurrent_states[0]``.
    record_past = True

    @property
    def layers(self) -> "defaultdict[int, States]":
        return defaultdict(lambda: self)

    def has_previous_state(self, layer: int, state_idx: int = 0) -> bool:
        return state_idx in self.conv_states

    def get_conv_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        return self.conv_states.get(state_idx)

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent_states.get(state_idx)

    def update_conv_state(
        self, inputs: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Return inputs (batch, channels, T) after the earlier ones. Keep the last ``conv_kernel_size``, 0 if fewer."""
        size = conv_kernel_size or inputs.size(-1)
        if state_idx in self.conv_states:
            inputs = torch.cat([self.conv_states[state_idx], inputs], dim=-1)
        self.conv_states[state_idx] = nn.functional.pad(inputs, (max(0, size - inputs.size(-1)), 0))[..., -size:]
        return inputs

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.recurrent_states[state_idx] = state
        return state


def stateful(model: nn.Module) -> list[nn.Module]:
    """Return the modules that read a state from a cache."""
    return [m for m in model.modules() if "update_conv_state" in unwrap(type(m).forward).__code__.co_names]


def fork_states(model: nn.Module) -> None:
    """Make the layers with a state compute packed rows (``packed_groups``). A second call has no effect."""
    # An instance attribute hides the method of the class, and the modules and their parameters keep their names.
    for module in stateful(model):
        if getattr(module.forward, "func", None) is _forward:
            continue
        name = cache_name(signature(module.forward).parameters)
        module.forward = partial(_forward, module.forward, name, type(module))


def _forward(
    unpacked_forward: Callable[..., Tensor],
    name: str,
    kind: type,
    /,
    hidden_states: Tensor,
    *args: Any,
    packed_groups: tuple[GroupLayout, ...] | None = None,
    packed_calls: Counter[str] | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute a packed row (1, L, D) -> (1, L, D), or call ``unpacked_forward`` if the rows are not packed.

    ``name``: the argument of ``unpacked_forward`` that is the cache.
    """
    if packed_groups is None:
        mask = kwargs.get("attention_mask")
        # `PackedScorer` passes a mask of four dimensions. A mask of a batch has two.
        if mask is not None and mask.dim() == 4:
            raise Unpackable(f"layers ({kind.__name__}) whose code ignores how a row is packed")
        return unpacked_forward(hidden_states, *args, **kwargs)
    if packed_calls is not None:
        packed_calls["states"] += 1
    outputs = []
    for group in packed_groups:
        states, start = States(), group.start
        if group.prompt:
            outputs.append(unpacked_forward(hidden_states[:, start : start + group.prompt], **{name: states})[0])
        start += group.prompt
        completions = hidden_states[0, start : start + sum(group.lengths)]
        segments = pad_sequence(completions.split(group.lengths), batch_first=True)
        # For a single token some layers update their state in place, which autograd forbids. Pad to two.
        if segments.size(1) == 1:
            segments = nn.functional.pad(segments, (0, 0, 0, 1))
        after = unpacked_forward(segments, **{name: states.repeated(len(segments))})
        outputs += [output[:length] for output, length in zip(after, group.lengths, strict=True)]
    return torch.cat(outputs)[None]
