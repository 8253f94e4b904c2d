"""One additive float mask for all tokens that a batch decodes, instead of a bool mask that is built for each token.

transformers checks the padding for each token, which waits for the GPU, builds a bool mask, and each layer turns that
mask into floats. Here the mask of the longest row is built when the rows change, and each token gets a slice.

Serves sdpa. A layer with another mask (a sliding window, a prompt, a pass with several queries) gets transformers' own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask


@contextmanager
def one_decode_mask(model: Any, longest: int) -> Iterator[None]:
    """Give a model that generates rows of up to ``longest`` tokens its masks by `DecodeMask` inside this context."""
    masks: dict[str, Any] = AttentionMaskInterface._global_mapping
    name = model.config._attn_implementation
    # Older classes compute with the mask instead of passing it to an attention function.
    if masks.get(name) is not sdpa_mask or not model._supports_attention_backend:
        yield
        return
    masks[name] = DecodeMask(longest)
    try:
        yield
    finally:
        masks[name] = sdpa_mask


class DecodeMask:
    """transformers' mask interface: the mask (R, 1, 1, T) of one new token per row, or None without any padding."""

    def __init__(self, longest: int) -> None:
        # A row of the buffer begins at a multiple of 16 bytes: otherwise torch copies the mask in each layer.
        self.width = -(-longest // 8) * 8
        self.rows = 0
        self.buffer: Tensor | None = None

    def __call__(self, **kwargs: Any) -> Tensor | None:
        mask, length = kwargs.get("attention_mask"), kwargs["kv_length"]
        is_plain = kwargs["mask_function"] is causal_mask_function and kwargs.get("local_size") is None
        if mask is None or kwargs["q_length"] > 1 or not is_plain or mask.size(1) != length:
            return sdpa_mask(**kwargs)
        # Rows only leave a batch, so another number of rows means other rows. New tokens are never masked.
        if mask.size(0) != self.rows:
            self.rows = mask.size(0)
            self.buffer = None if bool(mask.all()) else self._additive(mask, kwargs["dtype"])
        return None if self.buffer is None else self.buffer[..., :length]

    def _additive(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        kind = mask.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
        buffer = torch.zeros(mask.size(0), 1, 1, self.width, dtype=dtype, device=mask.device)
        buffer[..., : mask.size(1)].masked_fill_(~mask[:, None, None], float("-inf"))
        return buffer
