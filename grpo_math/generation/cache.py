"""KV caches that save work in generation: the shared prefix of a batch of prompts, and the earlier turns of a chat.

Prompts (P, S) are padded on the left. A cache is filled column by column for all rows at once. So the known keys and
values of a row fill its columns up to the first column that some row has to compute.

Supports layers with keys and values. A state (linear attention) has no columns: it is computed from the first token.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

SAVED = 256  # tokens of a batch: to save fewer, the shared prefix is not computed separately
ROOM = 64  # additional tokens for which a layer's buffer is allocated
Held = tuple[Tensor, Tensor]  # keys and values (H, T, D) of a row in one layer


def fill_shared_prefix(model: Any, prompts: Tensor, model_kwargs: dict[str, Any]) -> int:
    """Compute the shared prefix of left-padded prompts (P, S) once, for all their caches. Return the filled columns.

    A row with k tokens of padding has its first token in column k. The prefix of L tokens fills columns k to L - 1 of
    the row. The last k tokens of the prefix are computed with the remaining tokens of the row.
    """
    cache, mask = model_kwargs["past_key_values"], _mask_of(prompts, model_kwargs)
    if any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers):
        return 0  # a state has no columns
    padding = mask.argmax(dim=1, keepdim=True)
    columns = torch.arange(prompts.size(1), device=prompts.device)
    places = (columns + padding).clamp(max=columns.numel() - 1)
    same = mask.gather(1, places) == 1
    for values in (prompts, *(v for v in model_kwargs.values() if isinstance(v, Tensor) and v.shape == prompts.shape)):
        same &= (aligned := values.gather(1, places)) == aligned[:1]
    length = min(int(same.all(dim=0).cumprod(dim=0).sum()), prompts.size(1) - int(padding.max()) - 1)
    if (prompts.size(0) - 1) * length < SAVED:
        return 0
    first = slice(int(padding[0]), int(padding[0]) + length)
    one = {
        name: value[:1, first] if isinstance(value, Tensor) and value.shape == prompts.shape else value
        for name, value in model_kwargs.items()
    }
    model(**model.prepare_inputs_for_generation(prompts[:1, first], is_first_iteration=True, **one), return_dict=True)
    source = (columns[:length] - padding).clamp(min=0)  # (P, L): the prefix token of each column
    cache.layers = [
        GrowingLayer(*(held[0][:, source].transpose(0, 1).contiguous() for held in (layer.keys, layer.values)))
        for layer in cache.layers
    ]
    return length


class TurnCache:
    """The keys and values of unfinished conversations, from one call of `decode` to the next.

    ``goes_on(prompt, completion)`` returns True if a turn, given as token ids, calls a tool. Keys and values are used
    in the next call only, and are valid while the weights do not change: make a new cache after an update.
    """

    def __init__(self, goes_on: Callable[[list[int], list[int]], bool]) -> None:
        self.goes_on = goes_on
        self.rows: dict[tuple[int, ...], list[Held]] = {}

    def keep(self, ids: Tensor, prompt: int, stays: Tensor, model_kwargs: dict[str, Any], *, last: bool) -> None:
        """Save the keys and values, without the last token, of finished rows of ``ids`` (R, S + t) that call a tool.

        ``last``: no row is left to compute, so views of the cache are saved, not copies.
        """
        layers, mask = model_kwargs["past_key_values"].layers, _mask_in_order(ids, model_kwargs)
        if mask is None or not all(isinstance(layer, GrowingLayer) for layer in layers):
            return
        for row in (~stays).nonzero()[:, 0].tolist():
            start = int(mask[row].argmax())
            before, completion = ids[row, start:prompt].tolist(), ids[row, prompt:].tolist()
            if self.goes_on(before, completion):
                held = [(layer.keys[row, :, start:], layer.values[row, :, start:]) for layer in layers]
                self.rows[*before, *completion[:-1]] = held if last else [(k.clone(), v.clone()) for k, v in held]

    def fill(self, prompts: Tensor, model_kwargs: dict[str, Any]) -> int:
        """Fill the cache of prompts (P, S) with keys and values of earlier turns. Return the filled columns of S."""
        rows, self.rows = self.rows, {}
        if not rows or (mask := _mask_in_order(prompts, model_kwargs)) is None:
            return 0
        lengths = sorted({len(ids) for ids in rows}, reverse=True)
        padding, known = mask.argmax(dim=1).tolist(), []
        for row, start in zip(prompts.tolist(), padding, strict=True):
            prefixes = (tuple(row[start : start + length]) for length in lengths if start + length < len(row))
            known.append(next((ids for ids in prefixes if ids in rows), ()))
        filled = min(start + len(ids) for start, ids in zip(padding, known, strict=True))
        if filled <= min(padding):
            return 0
        layers = model_kwargs["past_key_values"].layers
        for number in reversed(range(len(layers))):  # frees each layer's tensors once they are copied
            of_layer = {ids: held.pop() for ids, held in rows.items()}
            layers[number] = _placed([of_layer.get(ids) for ids in known], padding, filled)
        return filled


def _placed(known: list[Held | None], padding: list[int], filled: int) -> "GrowingLayer":
    """Return a layer of ``filled`` columns, with the known keys and values of each row after its padding."""
    some = next(filter(None, known))  # keys and values may differ in H and D
    both = [one.new_zeros(len(known), one.size(0), filled, one.size(2)) for one in some]
    for row, (one, start) in enumerate(zip(known, padding, strict=True)):
        if one is not None and filled > start:
            for whole, part in zip(both, one, strict=True):
                whole[row, :, start:filled] = part[:, : filled - start]
    return GrowingLayer(*both)


def _mask_of(ids: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
    mask = model_kwargs.get("attention_mask")
    return torch.ones_like(ids) if mask is None else mask


def _mask_in_order(ids: Tensor, model_kwargs: dict[str, Any]) -> Tensor | None:
    """Return the mask of rows that are padded only on the left, or None for other rows.

    Positions follow from this mask, as in `generate`. transformers runs calls that pass their own positions.
    """
    mask = _mask_of(ids, model_kwargs)
    return None if bool((mask.diff(dim=1) < 0).any()) else mask


class GrowingLayer(DynamicLayer):
    """Keys and values (rows, H, T, D) of one layer, as views of buffers into which new tokens are written in place.

    transformers' layer copies the whole cache for every token.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.buffers = (keys, values)
        self._hold(keys.size(0), keys.size(2))

    def _hold(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        self.rows, self.length = rows, length
        self.keys, self.values = (buffer[:rows, :, :length] for buffer in self.buffers)
        return self.keys, self.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, end = self.length, self.length + key_states.size(2)
        if end > self.buffers[0].size(2):
            self.buffers = (self._with_room(self.buffers[0], end), self._with_room(self.buffers[1], end))
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[: self.rows, :, start:end] = states
        return self._hold(self.rows, end)

    def _with_room(self, buffer: Tensor, length: int) -> Tensor:
        larger = buffer.new_empty(self.rows, buffer.size(1), length + ROOM, buffer.size(3))
        larger[:, :, : self.length] = buffer[: self.rows, :, : self.length]
        return larger

    def move(self, sources: Tensor, targets: Tensor, rows: int) -> None:
        """Copy the rows ``sources`` over the rows ``targets`` and keep the first ``rows``."""
        for buffer in self.buffers:
            buffer[targets, :, : self.length] = buffer[sources, :, : self.length]
        self._hold(rows, self.length)
