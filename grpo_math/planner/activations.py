"""What autograd keeps of a micro-batch between forward and backward, in bytes, and the largest temporaries. Pure.

Counted from how transformers, peft and trainer/attention.py write a layer; tests/planner holds it to what torch
allocates on a CPU, to 5%. Workspaces are allowances.

Does not know how large a micro-batch is: memory.py does.
"""

import re
from typing import NamedTuple

from grpo_math.errors import ConfigError
from grpo_math.planner.model import ATTENTION, MLP, Linear, Shape
from grpo_math.planner.settings import Settings

OFFLOAD_STASH = 5  # tensors that TRL's offloading keeps on the GPU until they are copied (max_fwd_stash_size)
HEAD_TOKENS, HEAD_VOCAB = 4096, 32768  # a tile of TRL 1.16's fused LM head (TOKEN_CHUNK_SIZE, and its chunk size)

LONG = 512  # tokens of a completion from which a CPU goes by trainer/cascade.py
TILE, MOST_TILES = 1024, 4  # the least tokens of a tile of trainer/tiles.py, and the most tiles


class Precision(NamedTuple):
    """Bytes of an element: weights and residual stream, matrix products, adapter weights.

    ``compute`` differs from ``stream`` under autocast alone: float32 weights, 16-bit products. bitsandbytes multiplies
    in the dtype of the stream.
    """

    stream: int
    compute: int
    adapter: int
    autocast: bool

    @property
    def half(self) -> int:
        """Of what autocast casts; matrix products of bitsandbytes go past it."""
        return 2 if self.autocast else self.compute

    @property
    def product(self) -> int:
        """Of what a LoRA multiplies."""
        return 2 if self.autocast else self.adapter


class Work(NamedTuple):
    """The largest micro-batch: ``prompts`` of ``prompt`` tokens, ``rows`` completions of ``completion`` tokens, and one
    more of ``last`` tokens that fills it."""

    prompts: int
    rows: int
    prompt: int
    completion: int
    packed: bool
    last: int = 0
    tiles: int = 1  # of tokens, in which an MLP is computed

    @property
    def tokens(self) -> int:
        """Packed: (prompt - 1) once a prompt, and every completion token. Otherwise every row has both."""
        if self.packed:
            return self.prompts * (self.prompt - 1) + self.scored
        return self.rows * (self.prompt + self.completion)

    @property
    def scored(self) -> int:
        return self.rows * self.completion + self.last


def targets(shape: Shape, settings: Settings) -> tuple[Linear, ...]:
    """The linear maps of a layer that get a LoRA: peft's reading of ``lora_target_modules``.

    peft's own choice for these families is q_proj and v_proj. TRL makes the one name of a list a string, which peft
    then takes as an expression for the whole name of a module.
    """
    wanted = settings["lora_target_modules"]
    if not settings["use_peft"]:
        return ()
    if wanted is None:
        wanted = ["q_proj", "v_proj"]
    if isinstance(wanted, list) and len(wanted) == 1:
        wanted = wanted[0]
    linears = shape.linears()
    if wanted == "all-linear":
        return linears
    names = [wanted] if isinstance(wanted, str) else wanted
    found = {name: tuple(x for x in linears if _matches(x, name, isinstance(wanted, str))) for name in names}
    for name in names:
        if not found[name]:
            remedy = f"use all-linear, or {', '.join((*ATTENTION, *MLP))}"
            raise ConfigError("lora_target_modules", name, "matches no linear map of a layer", remedy)
    return tuple(x for x in linears if any(x in found[name] for name in names))


def _matches(linear: Linear, name: str, pattern: bool) -> bool:
    path = f"model.layers.0.{linear.path}"
    return bool(re.fullmatch(name, path)) if pattern else f".{path}".endswith(f".{name}")


def layer_saved(
    shape: Shape, settings: Settings, precise: Precision, work: Work, *, cpu: bool = False, first: bool = False
) -> int:
    """Bytes that autograd keeps of one layer, as transformers writes it.

    Each norm keeps its input in float32 and one factor a token (and its normalised input where its weight is trained);
    a linear map keeps its input where its weight is trained or has a LoRA, in another copy where that input has to be
    cast; the MLP keeps gate, activated gate and up; attention what `_attention_saved` says. In tiles (trainer/tiles.py)
    the MLP keeps its input, and all else of one tile alone. ``first``: the layer whose input needs no gradient, with a
    frozen embedding and no checkpointing.
    """
    s, c, _, _ = precise
    full, h, i, tokens = not settings["use_peft"], shape.hidden, shape.intermediate, work.tokens
    targeted = {linear.name for linear in targets(shape, settings)}
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gemma, kernel = shape.family.startswith("gemma"), attention_kernel(shape, settings)

    def norm(width: int, dtype: int, rows: int = 1) -> int:
        # Gemma multiplies in float32, the others in the dtype of the input.
        return 4 * width + 4 * rows + full * (4 if gemma else dtype) * width

    def inputs(names: tuple[str, ...], n_in: int, dtype: int, held: bool = False) -> int:
        return _inputs_saved(n_in, dtype, [name in targeted for name in names], full, settings, precise, held)

    norms = norm(h, s) * shape.norms_per_layer - (first and not full) * norm(h, s)
    if shape.qk_norm:
        norms += norm(q, c, shape.heads) + norm(kv, c, shape.kv_heads)
    maps = inputs(ATTENTION[:3], h, s) + inputs(ATTENTION[3:], q, c, not (work.packed and cpu) and kernel != "eager")
    mlp = inputs(MLP[:2], h, s) + inputs(MLP[2:], i, c) + 3 * c * i
    cast = sum(linear.weights for linear in shape.linears()) * c if s != c else 0
    kept = tokens * (norms + maps + mlp) + _attention_saved(shape, precise, work, kernel, cpu) + cast
    if work.tiles > 1:  # the norm before the MLP is computed with it, and the input of both is kept
        kept += -(-tokens // work.tiles) * (norm(h, s) + mlp) - tokens * (norm(h, s) + mlp - h * s)
    return kept


def _inputs_saved(
    n_in: int, dtype: int, lora: list[bool], full: bool, settings: Settings, precise: Precision, held: bool = False
) -> int:
    """Bytes a token of the linear maps that share one input of ``dtype``; ``lora`` says which of them have one.

    ``held``: something else keeps that input already.
    """
    _, c, a, _ = precise
    product, shared, own = precise.product, False, 0
    for has_lora in lora:
        if full and dtype == c:
            shared = True
        elif full:
            own += c * n_in
        if not has_lora:
            continue
        own += settings["lora_r"] * product
        if settings["lora_dropout"] > 0:
            own += n_in + product * n_in  # the mask, and what it leaves
        elif dtype == a == product:
            shared = True
        else:
            own += product * n_in
    return own + (shared and not held) * dtype * n_in


def tiles(shape: Shape, settings: Settings, tokens: int) -> int:
    """In how many tiles of tokens trainer/tiles.py computes an MLP."""
    whole = settings["use_dora"] and any(linear.name in MLP for linear in targets(shape, settings))
    if whole or settings["load_in_8bit"] or shape.norms_per_layer == 4:  # one of them after the MLP
        return 1
    return max(1, min(MOST_TILES, tokens // TILE))


def packs(shape: Shape, settings: Settings) -> bool:
    """Whether the trainer packs. `attention.unsupported`: not where eager attention is asked for."""
    return settings["pack_updates"] and settings["attn_implementation"] != "eager"


def attention_kernel(shape: Shape, settings: Settings) -> str:
    """eager, flash or sdpa. Where nothing is asked for, transformers runs Gemma 2, with soft-capped scores, eagerly."""
    asked = settings["attn_implementation"] or ("eager" if shape.family == "gemma2" else "sdpa")
    return "flash" if "flash" in asked else asked


def _attention_saved(shape: Shape, precise: Precision, work: Work, kernel: str, cpu: bool) -> int:
    """Bytes that the attention of a layer keeps: query, keys, values, output, a float32 for each head and token.

    Packed (trainer/varlen.py): keys and values of the prompt, and of [prompt, segment] for each segment. Unpacked: keys
    and values repeated, and a mask for each row; eager also keeps the scores; flash repeats nothing.
    """
    c = precise.half
    heads, q, kv = shape.heads, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tokens = work.tokens
    if not work.packed:
        scores = work.rows * (work.prompt + work.completion) ** 2
        if kernel == "flash":
            return tokens * (2 * c * (q + kv) + 4 * heads)
        if kernel == "eager":  # the softmax in float32, its cast, and Gemma 2's tanh
            kept = 4 + (c if c != 4 else 0) + (c if shape.family == "gemma2" else 0)
            return tokens * 3 * c * q + scores * heads * kept
        return tokens * (4 * c * q + 4 * heads) + scores * c
    c = 4 if cpu else c  # trainer/attention.py computes in float32 there
    before = work.prompt - 1
    keys = tokens - work.scored + work.rows * (before + work.completion) + (work.last and before + work.last)
    if kernel == "eager":  # capped scores, sequence by sequence: tanh, the softmax in float32, its cast, and a mask
        scores = work.prompts * before**2 + work.rows * work.completion * (before + work.completion)
        scores += work.last * (before + work.last)
        return tokens * c * q + 2 * keys * c * q + scores * (heads * (4 + c + (c if c != 4 else 0)) + 1)
    if cpu and work.completion >= LONG:
        keys = tokens  # a cascade: nothing is gathered
    return tokens * (2 * c * q + 4 * heads) + 2 * keys * c * kv


def kept(shape: Shape, settings: Settings, precise: Precision, work: Work, *, cpu: bool = False) -> int:
    """Bytes that the layers of the largest micro-batch keep between the forward and the backward pass.

    With checkpointing (arXiv 1604.06174): the input of every layer. Without: all that `layer_saved` says of every
    layer. Both: the rotary tables.
    """
    s, h, tokens = precise.stream, shape.hidden, work.tokens
    rotary = tokens * 2 * shape.head_dim * s
    if settings["gradient_checkpointing"]:
        inputs = min(shape.layers, OFFLOAD_STASH) if settings["activation_offloading"] else shape.layers
        return inputs * tokens * h * s + rotary
    layer = layer_saved(shape, settings, precise, work, cpu=cpu)
    return layer_saved(shape, settings, precise, work, cpu=cpu, first=True) + (shape.layers - 1) * layer + rotary


def ends_kept(shape: Shape, full: bool, precise: Precision, work: Work) -> int:
    """And until the backward pass comes to the layers: the last norm, and the scored hidden states of the LM head."""
    s, h = precise.stream, shape.hidden
    return work.tokens * (4 * h + 4 + full * s * h) + work.scored * (s * h + 16)


def without_triton(shape: Shape, scored: int) -> int:
    """What that head takes besides where it has no kernel, as on a CPU: seven float32 tensors of a tile's size."""
    return 7 * min(scored, HEAD_TOKENS) * min(shape.vocab, HEAD_VOCAB) * 4


def lm_head_workspace(shape: Shape, full: bool, scored: int, precise: Precision) -> int:
    """TRL's fused LM head (trl/kernels/chunked_logprob.py): one tile of logits, a float32 gradient of the hidden states
    and, where the head is trained, of its weights, and both once more in their own dtype where that is another."""
    tile = min(scored, HEAD_TOKENS) * HEAD_VOCAB * precise.half
    gradients = 4 + (precise.stream if precise.stream != 4 else 0)
    hidden = scored * shape.hidden * gradients
    if precise.stream != precise.half:  # a slice of the weights, cast
        tile += min(shape.vocab, HEAD_VOCAB) * shape.hidden * precise.half
    return tile + hidden + full * shape.vocab * shape.hidden * gradients


def layer_workspace(shape: Shape, settings: Settings, precise: Precision, work: Work) -> int:
    """What a layer holds besides `layer_saved` at the fullest moment of its (re)computation and backward pass.

    Three moments can be that, all of them in the MLP, whose tensors are the widest. ``computed``: its last linear map
    has just been computed: its input is there, as are the copies that a LoRA reads, the norm's output, and what the map
    and its LoRA give. ``split``: the product of activated gate and up has its gradient and has given both of them
    theirs; what the last map kept is gone. ``trained``: the gradient of that map's weights. The gradient of the layer's
    output is there in all three. In tiles: of one tile, with the gradients of the others' inputs, and of weights, which
    are summed over tiles before they go on.
    """
    s, c, _, autocast = precise
    h, i, full, last = shape.hidden, shape.intermediate, not settings["use_peft"], shape.linears()[-1]
    tokens = -(-work.tokens // work.tiles)
    lora = last in targets(shape, settings)
    saved = _inputs_saved(i, c, [lora], full, settings, precise)
    given = h * (c + lora * (c + precise.product)) if work.tiles == 1 else 0  # tiles are recomputed up to what is kept
    computed = i * _copies_read(settings, precise, lora) + h * s + given
    dequantised = last.weights * c + last.weights // 16 if settings["load_in_4bit"] else 0  # and its constants
    moments = [tokens * computed, tokens * c * i + dequantised, tokens * (3 * c * i - saved)]
    if full:  # its cast, too, where the weights are in float32
        moments.append(tokens * (c * i - saved) + last.weights * (c + (s if autocast and s != c else 0)))
    if work.tiles == 1:
        return work.tokens * h * s + max(moments)
    return 2 * work.tokens * h * s + max(moments) + full * 3 * last.weights * c


def _copies_read(settings: Settings, precise: Precision, lora: bool) -> int:
    """Bytes an element of the input of a linear map and of the copies that its LoRA reads, those left out that autograd
    keeps: the input in the adapter's dtype, and what the dropout leaves of it."""
    _, c, a, autocast = precise
    if not settings["use_peft"]:
        return 0
    if not lora:
        return c
    reads = c if autocast and settings["load_in_4bit"] else a  # peft casts for bitsandbytes only without autocast
    drops, product = settings["lora_dropout"] > 0, precise.product
    kept_as_it_is = reads == product and not drops
    given = 0 if kept_as_it_is and reads == c else c
    cast = 0 if reads == c or kept_as_it_is else reads
    return given + cast + (reads if drops and reads != product else 0)


def prefill_workspace(shape: Shape, settings: Settings, precise: Precision, tokens: int, tiled: int = 1) -> int:
    """What a layer holds while nothing is kept for a backward pass: in its MLP, or in the last map of its attention.

    The MLP: three tensors of its width; with a LoRA there its result and its sum, or before the last map the copies
    that it reads; and four of the stream's. ``tiled``: it is computed in so many tiles, whose results are then joined.
    The attention: three tensors of the stream's width, query and output, the map's result, and what its LoRA reads and
    gives in its own dtype.
    """
    s, c, a, _ = precise
    h, q, tile = shape.hidden, shape.heads * shape.head_dim, -(-tokens // tiled)
    adapted, drops = {linear.name for linear in targets(shape, settings)}, settings["lora_dropout"] > 0
    wide = 4 * c if adapted & set(MLP[:2]) else 3 * c
    if MLP[2] in adapted:
        saved = _inputs_saved(1, c, [True], False, settings, precise) - settings["lora_r"] * precise.product
        wide = max(wide, saved + _copies_read(settings, precise, lora=True))
    mlp = tile * (wide * shape.intermediate + s * h) + tokens * (3 + (tiled > 1)) * s * h
    lora = a * (((a != c) + drops) * q + h) if ATTENTION[3] in adapted else 0
    attention = tokens * (3 * s * h + c * (2 * q + h) + lora)
    return max(mlp, attention) + tokens * 2 * shape.head_dim * s
