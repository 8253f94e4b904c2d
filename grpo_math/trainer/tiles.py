"""The MLP of a decoder layer over a tile of tokens at a time: what is as wide as the MLP is never there for all tokens.

At the peak of an update with gradient checkpointing stand the tensors (tokens, intermediate) of the one layer that is
recomputed: gate, up, their activation and product, and the gradients of these. An MLP treats each token by itself, so
that a tile of tokens gives what it gives among all. Of the MLP only its input is kept here; when the backward pass
comes to a tile, gate and up of that tile alone are computed again, for the next tile to take their place.

That is no more work than checkpointing does. An MLP comes last in its layer: the recomputation of the layer ends with
the last tensor that autograd asks of it, which is now the MLP's input, and leaves the MLP out. Where no gradient is
asked for (rollouts, scoring), tiles are computed one after the other.

Parameters get their gradient through autograd itself, summed over tiles before a hook of DDP or DeepSpeed hears of it.

A dropout in the MLP draws for each tile, and the same again when the tile is recomputed.

Does not serve checkpointing with ``use_reentrant``, whose recomputation runs to the layer's end, or parameters that are
split among processes: `serves` says where it works, and the others compute as they did.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

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


def about(layers: int, tokens: int) -> str | None:
    """What is said at the start of a run whose passes have some ``tokens``; None where no MLP comes to be in tiles.

    >>> about(28, 4096)
    'MLPs of 28 layers in up to 4 tiles of at least 1024 tokens'
    >>> about(28, 2047), about(0, 4096)
    (None, None)
    """
    if not layers or tokens < 2 * LEAST:
        return None
    return f"MLPs of {layers} layers in up to {MOST} tiles of at least {LEAST} tokens"


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
        parts = layer.mlp.modules()
        self.draws = any(isinstance(part, torch.nn.Dropout) and part.p > 0 for part in parts)
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
        rows = _Keep.apply(rows)
        kept, outputs = _Kept(rows.grad_fn, n), []
        for number, tile in enumerate(rows.tensor_split(n)):
            later = _Later(compute, kept, number, states.device.type, self.draws)
            with saved_tensors_hooks(later.pack, later.unpack):
                outputs.append(compute(tile))
        return torch.cat(outputs).view(states.shape)


class _Keep(torch.autograd.Function):
    """The identity, and what the tiles' input is kept by: the last tensor that checkpointing has to bring back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Kept:
    """The input of all tiles, asked of autograd once for the backward pass of them all."""

    def __init__(self, node: Any, n: int) -> None:
        self.node, self.n, self.missing = node, n, n
        self.rows: Any = None

    def tile(self, number: int) -> Tensor:
        if self.rows is None:
            (self.rows,) = self.node.saved_tensors
        tile: Tensor = self.rows.tensor_split(self.n)[number]
        self.missing -= 1
        if not self.missing:
            self.rows, self.missing = None, self.n
        return tile


class _Done(Exception):
    """All that autograd keeps of a tile is there again."""


class _Later:
    """What autograd keeps of a tile: nothing at first, and all of it when it asks for the first."""

    def __init__(self, forward: Callable[[Tensor], Tensor], kept: _Kept, number: int, kind: str, draws: bool) -> None:
        self.forward, self.kept, self.number, self.count = forward, kept, number, 0
        self.there: dict[int, Tensor] = {}
        places = (torch, getattr(torch, kind, None)) if draws else ()
        self.generators: list[Any] = [place for place in places if hasattr(place, "get_rng_state")]
        self.drawn: list[Tensor] = [place.get_rng_state() for place in self.generators]
        self.autocast: dict[str, Any] = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }

    def pack(self, tensor: Tensor) -> int:
        self.count += 1
        return self.count - 1

    def unpack(self, place: int) -> Tensor:
        if place not in self.there:
            self._compute()
        return self.there.pop(place)

    def _compute(self) -> None:
        """The tile's forward once more, up to the last tensor that is kept."""
        there: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> None:
            there[len(there)] = tensor.detach()
            if len(there) == self.count:
                raise _Done

        def unpack(nothing: None) -> Tensor:
            raise RuntimeError("the graph of a recomputed tile is not walked")

        states = self.kept.tile(self.number).detach().requires_grad_()
        again = torch.autocast(**self.autocast), saved_tensors_hooks(pack, unpack)
        with suppress(_Done), torch.enable_grad(), again[0], again[1], self._as_drawn():
            self.forward(states)
        self.there = there

    @contextmanager
    def _as_drawn(self) -> Iterator[None]:
        """A dropout draws what it drew at first, and what is drawn elsewhere does not change for it."""
        now = [place.get_rng_state() for place in self.generators]
        try:
            for place, state in zip(self.generators, self.drawn, strict=True):
                place.set_rng_state(state)
            yield
        finally:
            for place, state in zip(self.generators, now, strict=True):
                place.set_rng_state(state)
