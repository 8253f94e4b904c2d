"""The tiled MLP: a decoder layer computes its MLP over a few thousand tokens at a time.

With gradient checkpointing, an update needs most memory while the MLP of one layer is recomputed: gate, up, their
activation, their product, and the gradients of these, each (tokens, intermediate). An MLP treats each token by itself,
so a tile of tokens gives the same result alone. Only the input of the MLP is saved. In the backward pass each tile is
recomputed by itself, and its tensors are freed before the next tile needs theirs.

DeepSpeed's `TiledMLP` does the same, but computes an MLP three times under checkpointing, adds to ``.grad`` behind
autograd's back, and so cannot serve DDP's hooks or `torch.autograd.grad` (`longest.py`). Here no product is computed
more often than checkpointing does: the recomputation of a layer ends with the last tensor that the layer saves, which
is now the input of the MLP.

Does not work with ``use_reentrant``, which recomputes a layer to its end, or with parameters that are split among
processes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo_math.run.weights import split_by

LEAST = 1024  # tokens of a tile: smaller products leave a large GPU idle
MOST = 4  # tiles: for each of them 4-bit weights are spelled out once more

PARTS = ("gate_proj", "up_proj", "down_proj")
# Which treat every token by itself: in 8 bit, others decide about outliers.
MAPS = ("Linear", "Linear4bit")
# Layers whose ``post_attention_layernorm`` feeds the MLP, and nothing else: it is computed in the tiles as well.
NORMED = tuple(f"{name}DecoderLayer" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma"))


def set_up_as_asked(models: list[Any], args: Any, accelerator: Any) -> int:
    """`set_up` as the training arguments allow: not where parameters are split or compiled. How many layers' MLPs are
    in tiles in an update."""
    reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    learns = bool(args.gradient_checkpointing and not reentrant)
    if split_by(accelerator) or args.torch_compile:
        return 0
    return learns * set_up(models, learns)


def set_up(models: list[Any], learns: bool) -> int:
    """Let the MLPs of these models work in tiles; how many do. ``learns``: in passes with a gradient, too."""
    layers = [layer for model in models for layer in model.modules() if serves(layer)]
    for layer in layers:
        Tiled(layer, learns)
    return len(layers)


def serves(layer: Any) -> bool:
    """Whether this module is a decoder layer whose MLP can work in tiles: gate, up and down alone, and last in it."""
    mlp = getattr(layer, "mlp", None)
    if not isinstance(mlp, torch.nn.Module) or not hasattr(layer, "gradient_checkpointing"):
        return False
    children = dict(mlp.named_children())
    # A norm behind the MLP keeps its output, which would have to be recomputed.
    normed = any(name.startswith(("post_feedforward", "post_mlp")) for name, _ in layer.named_children())
    return not normed and set(children) == {*PARTS, "act_fn"} and all(_by_token(children[name]) for name in PARTS)


def _by_token(linear: Any) -> bool:
    """Whether a linear map, with its LoRA if it has one, treats every token by itself."""
    base = getattr(linear, "base_layer", linear)
    return type(base).__name__ in MAPS and not getattr(linear, "lora_variant", None)


class Tiled:
    """Takes the place of the forward of a layer's MLP: (..., H) -> (..., H), in tiles where there are tokens for two.

    Where the norm before it is known, too, that one leaves its work to the tiles.
    """

    def __init__(self, layer: Any, learns: bool) -> None:
        self.layer, self.learns, self.mlp = layer, learns, layer.mlp.forward
        self.norm: Any = None
        self.left: Tensor | None = None  # what the norm has handed on as it was
        layer.mlp.forward = self.forward
        if type(layer).__name__ in NORMED:
            self.norm = layer.post_attention_layernorm.forward
            layer.post_attention_layernorm.forward = self.norm_or_leave

    def tiles(self, states: Tensor) -> int:
        if torch.is_grad_enabled():
            recomputed = self.learns and self.layer.training and self.layer.gradient_checkpointing
            if not (recomputed and states.requires_grad):
                return 1
        return min(MOST, states.numel() // states.size(-1) // LEAST)

    def norm_or_leave(self, states: Tensor) -> Tensor:
        if self.tiles(states) < 2:
            return self.norm(states)
        self.left = states
        return states

    def forward(self, states: Tensor) -> Tensor:
        left, self.left = self.left, None
        if left is not None:
            if left is not states:
                raise RuntimeError(f"the norm of {type(self.layer).__name__} does not feed its MLP")
            return self._in_tiles(states, lambda tile: self.mlp(self.norm(tile)))
        return self._in_tiles(states, self.mlp)

    def _in_tiles(self, states: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        if (n := self.tiles(states)) < 2:
            return compute(states)
        rows = states.reshape(-1, states.size(-1))
        if not torch.is_grad_enabled():
            return torch.cat([compute(tile) for tile in rows.tensor_split(n)]).view(states.shape)
        tiles = _Input(_Save.apply(rows), n)

        def compute_tile(number: int, device: list[Tensor]) -> Tensor:
            return compute(tiles.tile(number))

        # `checkpoint` saves its tensor arguments. That would be one more tensor for the layer's own checkpoint to
        # recompute, behind the MLP. So a tile is passed as its number, and an empty tensor in a list tells `checkpoint`
        # the device whose random numbers a dropout has drawn. (Before torch 2.13 `checkpoint` always saves a tensor:
        # gradients are the same, but tiles are computed once more.)
        device = [rows.new_empty(0)]
        outputs: Any = [checkpoint(compute_tile, number, device, use_reentrant=False) for number in range(n)]
        return torch.cat(outputs).view(states.shape)


class _Save(torch.autograd.Function):
    """The identity, which saves the MLP's input."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Input:
    """The MLP's input in ``n`` tiles: in the forward pass as it is, in the backward pass as `_Save` has saved it."""

    def __init__(self, rows: Tensor, n: int) -> None:
        self.saved: Any = rows.grad_fn
        self.rows: Tensor | None = rows
        self.n, self.left = n, n  # ``left``: the tiles that this pass has still to take

    def tile(self, number: int) -> Tensor:
        # Checkpointing gives a saved tensor out once in a backward pass, so all tiles share it.
        if self.rows is None:
            (rows,) = self.saved.saved_tensors
            self.rows = rows.detach().requires_grad_()
        tile: Tensor = self.rows.tensor_split(self.n)[number]
        self.left -= 1
        if not self.left:
            self.rows, self.left = None, self.n
        return tile
