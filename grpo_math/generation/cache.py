"""KV caches that save work in generation: of the shared prefix of a batch of prompts, and one that grows in place.

Prompts (P, S) are padded on the left. A cache is filled column by column for all rows at once. So the known keys and
values of a row fill its columns up to the first column that some row has to compute.

Supports layers with keys and values. A state (linear attention) has no columns: it is computed from the first token.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from grpo_math.generation.names import cache_name
from grpo_math.run.speed_ups import switched_off

# Tokens of a batch. The separate forward pass for the prefix takes time itself, so it must save this many.
MIN_SAVED_TOKENS = 256
# Additional tokens for which a layer's buffer is allocated, so that the cache is copied once per 64 tokens.
SPARE_COLUMNS = 64


def fill_shared_prefix(model: Any, prompts: Tensor, model_kwargs: dict[str, Any]) -> int:
    """Compute the shared prefix of left-padded prompts (P, S) once, for all their caches. Return the filled columns.

    A row with k tokens of padding has its first token in column k. The prefix of L tokens fills columns k to L - 1 of
    the row. The last k tokens of the prefix are computed with the remaining tokens of the row.
    """
    cache, mask = model_kwargs[cache_name(model_kwargs)], model_kwargs.get("attention_mask")
    mask = torch.ones_like(prompts) if mask is None else mask
    padding = mask.argmax(dim=1, keepdim=True)
    columns = torch.arange(prompts.size(1), device=prompts.device)
    # The column of token t in each row, so that rows are compared without their padding. Behind a row's end, its last
    # token is repeated.
    places = (columns + padding).clamp(max=columns.numel() - 1)
    aligned = prompts.gather(1, places)
    # The positions follow from the mask.
    same = (mask.gather(1, places) == 1) & (aligned == aligned[:1])

    # The shortest prompt ends first, so it bounds the prefix. One token must be left to compute, because the first
    # completion token is sampled from its logits.
    length = min(int(same.all(dim=0).cumprod(dim=0).sum()), prompts.size(1) - int(padding.max()) - 1)
    # The prefix is computed once instead of for each prompt.
    if (prompts.size(0) - 1) * length < MIN_SAVED_TOKENS:
        return 0
    if any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers):
        switched_off("shared prefix", "a layer of the model has a state instead of keys and values")
        return 0

    first = slice(int(padding[0]), int(padding[0]) + length)
    # The first row without its padding, so that the model gets an ordinary prompt.
    one = {
        name: value[:1, first] if isinstance(value, Tensor) and value.shape == prompts.shape else value
        for name, value in model_kwargs.items()
    }
    model(**model.prepare_inputs_for_generation(prompts[:1, first], is_first_iteration=True, **one), return_dict=True)

    # (P, L): the prefix token of each column. Padding gets a copy of the first token, which the mask excludes.
    source = (columns[:length] - padding).clamp(min=0)
    cache.layers = [
        GrowingLayer(*(states[0][:, source].transpose(0, 1).contiguous() for states in (layer.keys, layer.values)))
        for layer in cache.layers
    ]
    return length


class GrowingLayer(DynamicLayer):
    """Keys and values (rows, H, T, D) of one layer, as views of buffers into which new tokens are written in place.

    transformers' layer copies the whole cache for every token.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        # A layer that is not initialized has length 0 for transformers. `_set_views` replaces the empty keys.
        self.lazy_initialization(keys, values)
        self.buffers = (keys, values)
        self._set_views(keys.size(0), keys.size(2))

    def _set_views(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        self.rows = rows
        self.length = length
        self.keys = self.buffers[0][:rows, :, :length]
        self.values = self.buffers[1][:rows, :, :length]
        return self.keys, self.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, end = self.length, self.length + key_states.size(2)
        if end > self.buffers[0].size(2):
            self.buffers = (
                self._with_spare_columns(self.buffers[0], end),
                self._with_spare_columns(self.buffers[1], end),
            )
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[: self.rows, :, start:end] = states
        return self._set_views(self.rows, end)

    def _with_spare_columns(self, buffer: Tensor, length: int) -> Tensor:
        # Only as many rows as are left, so that the memory of finished rows is freed.
        larger = buffer.new_empty(self.rows, buffer.size(1), length + SPARE_COLUMNS, buffer.size(3))
        larger[:, :, : self.length] = buffer[: self.rows, :, : self.length]
        return larger

    def move(self, sources: Tensor, targets: Tensor, rows: int) -> None:
        """Copy the rows ``sources`` over the rows ``targets`` and keep the first ``rows``."""
        for buffer in self.buffers:
            buffer[targets, :, : self.length] = buffer[sources, :, : self.length]
        self._set_views(rows, self.length)
