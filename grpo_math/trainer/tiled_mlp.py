"""The tiled MLP: a decoder layer computes its MLP over a few thousand tokens at a time.

With gradient checkpointing, an update needs most memory while the MLP of one layer is recomputed: gate, up, their
activation, their product, and the gradients of these, each (tokens, intermediate). An MLP treats each token by itself,
so a tile of tokens gives the same result alone. Only the input of the MLP is saved. In the backward pass each tile is
recomputed by itself, and its tensors are freed before the next tile needs theirs.

DeepSpeed's `TiledMLP` does the same, but computes an MLP three times under checkpointing. It adds to ``.grad`` outside
of autograd, and so does not work with DDP's hooks or `torch.autograd.grad` (`largest_batch.py`). Here no product is
computed more often than checkpointing does: the recomputation of a layer ends with the last tensor that the layer
saves, which is now the input of the MLP.

Does not work with ``use_reentrant``, which recomputes a layer to its end, or with parameters that are split among
processes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from grpo_math.generation.names import NORMED
from grpo_math.packing.altered import LIBRARIES, is_altered
from grpo_math.packing.row_plan import MAX_TILES, MIN_TOKENS
from grpo_math.run.speed_ups import switched_off
from grpo_math.run.weights import split_by
from grpo_math.system.user_functions import is_foreign

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# These treat every token by itself. In 8 bit, other tokens decide which columns are outliers.
LINEAR = ("Linear", "Linear4bit")


def tile_as_configured(models: list[Any], args: Any, accelerator: Any) -> list["TiledMLP"]:
    """Call `tile_layers` if the training arguments allow it."""
    # Without checkpointing, each tile would keep its tensors until the backward pass.
    if not args.gradient_checkpointing:
        return []
    hindrances = {
        "use_reentrant": (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"),
        "torch_compile": args.torch_compile,
        f"{split_by(accelerator)}, which splits the weights": split_by(accelerator),
    }
    reason = next((reason for reason, applies in hindrances.items() if applies), None)
    tiled = [] if reason else tile_layers(models)
    if not tiled:
        switched_off("tiled MLP", reason or "no layer of the model ends with gate, up and down projections")
    return tiled


def tile_layers(models: list[Any]) -> list["TiledMLP"]:
    """Tile the MLPs of these models, and return them."""
    layers = [layer for model in models for layer in model.modules() if can_tile(layer)]
    # An earlier trainer may have tiled them.
    return [layer.mlp.forward.__self__ if "forward" in vars(layer.mlp) else TiledMLP(layer) for layer in layers]


def can_tile(layer: Any) -> bool:
    """Return True for a decoder layer that ends with an MLP of gate, up and down projections only."""
    mlp = getattr(layer, "mlp", None)
    if not isinstance(mlp, torch.nn.Module) or not hasattr(layer, "gradient_checkpointing"):
        return False
    children = dict(mlp.named_children())
    # Another library may have replaced the method, to move tensors to another device for example.
    forwards = [vars(one).get("forward") for one in (mlp, getattr(layer, "post_attention_layernorm", mlp))]
    # A norm after the MLP saves the MLP's output, so the recomputation of the layer would include the MLP.
    normed = any(name.startswith(("post_feedforward", "post_mlp")) for name, _ in layer.named_children())
    return (
        not normed
        and all(one is None or isinstance(getattr(one, "__self__", None), TiledMLP) for one in forwards)
        and set(children) == {*PROJECTIONS, "act_fn"}
        and all(_by_token(children[name]) for name in PROJECTIONS)
    )


def _by_token(linear: Any) -> bool:
    """Return True if a linear layer, with its LoRA if it has one, treats every token by itself."""
    base = getattr(linear, "base_layer", linear)
    return type(base).__name__ in LINEAR and not getattr(linear, "lora_variant", None)


class TiledMLP:
    """Replaces the forward of a layer's MLP, (..., H) -> (..., H): in tiles if there are enough tokens for two.

    In the layers of `NORMED` this forward computes the norm before the MLP, too: in tiles its output is not kept.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.mlp = layer.mlp
        self.norm = layer.post_attention_layernorm if type(layer).__name__ in NORMED else None
        # Only code of libraries computes the MLP and its norm. `RowScorer` decides again if a script changes the model.
        self.is_unaltered = True
        # The MLP's input, if its norm is computed in the tiles.
        self.not_normed: Tensor | None = None
        # Only ``forward`` is replaced. A new module would change the names of parameters in checkpoints.
        self.mlp.forward = self.forward
        if self.norm is not None:
            self.norm.forward = self.defer_norm

    def tiles(self, states: Tensor) -> int:
        """Return the number of tiles for these tokens."""
        if not self.is_unaltered:
            return 1
        if torch.is_grad_enabled():
            # transformers checkpoints a layer in training mode only.
            recomputed = self.layer.training and self.layer.gradient_checkpointing
            if not (recomputed and states.requires_grad):
                return 1
        return min(MAX_TILES, states.numel() // states.size(-1) // MIN_TOKENS)

    def decide(self) -> None:
        """Find out if a script has changed how the MLP or its norm is computed. Such a layer has no tiles.

        A hook would get tiles in place of the MLP's tensors, and a new module or method might read another input.
        """
        layer, norm = self.layer, self.norm
        modules = [*self.mlp.modules(), *([norm] if norm is not None else [])]
        replaced = layer.mlp is not self.mlp or (norm is not None and layer.post_attention_layernorm is not norm)
        # A layer's hooks do not see the MLP, but a replaced forward method may compute something else.
        self.is_unaltered = not (replaced or is_foreign(layer.forward, LIBRARIES) or any(map(is_altered, modules)))
        if not self.is_unaltered:
            switched_off("tiled MLP", f"a hook, a method or a module of a script in {type(layer).__name__}")

    def defer_norm(self, states: Tensor) -> Tensor:
        defers = self.tiles(states) > 1
        self.not_normed = states if defers else None
        return states if defers else class_forward(self.norm, states)

    def forward(self, states: Tensor) -> Tensor:
        deferred = self.not_normed is not None
        self.not_normed = None
        if deferred:
            return self._in_tiles(states, lambda tile: class_forward(self.mlp, class_forward(self.norm, tile)))
        if self.tiles(states) < 2:
            return class_forward(self.mlp, states)
        return self._in_tiles(states, lambda tile: class_forward(self.mlp, tile))

    def _in_tiles(self, states: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        n = self.tiles(states)
        rows = states.reshape(-1, states.size(-1))
        if not torch.is_grad_enabled():
            return torch.cat([compute(tile) for tile in rows.tensor_split(n)]).view(states.shape)
        tiles = _Input(_Save.apply(rows), n)

        def compute_tile(number: int, device: list[Tensor]) -> Tensor:
            return compute(tiles.tile(number))

        # `checkpoint` saves its tensor arguments. The layer's own checkpoint would then recompute the whole MLP to get
        # them. So a tile is passed as its number, and an empty tensor in a list tells `checkpoint` the device whose
        # random numbers dropout uses. Before torch 2.13 `checkpoint` also saves a second empty tensor: the hooks
        # hide it from the layer's checkpoint.
        device = [rows.new_empty(0)]
        with saved_tensors_hooks(_unchanged, _unchanged):
            outputs: Any = [checkpoint(compute_tile, number, device, use_reentrant=False) for number in range(n)]
        return torch.cat(outputs).view(states.shape)


def class_forward(module: Any, states: Tensor) -> Tensor:
    """Call the method that `TiledMLP` hides. A script may have changed it since."""
    output: Tensor = type(module).forward(module, states)
    return output


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


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
    """The MLP's input in ``n`` tiles: itself in the forward pass, and the tensor of `_Save` in the backward pass."""

    def __init__(self, rows: Tensor, n: int) -> None:
        self.saved: Any = rows.grad_fn
        self.rows: Tensor | None = rows
        # ``remaining``: the tiles of the current pass that were not taken yet.
        self.n = n
        self.remaining = n

    def tile(self, number: int) -> Tensor:
        # Checkpointing returns a saved tensor once per backward pass, so all tiles share it.
        if self.rows is None:
            (rows,) = self.saved.saved_tensors
            self.rows = rows.detach().requires_grad_()
        tile: Tensor = self.rows.tensor_split(self.n)[number]
        self.remaining -= 1
        if not self.remaining:
            self.rows = None
            self.remaining = self.n
        return tile
