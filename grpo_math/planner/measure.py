"""Measure a model's memory from its config.json: layers of each kind of its class, on tensors without memory.

`python -m grpo_math.planner.measure` answers each line with a JSON request by one JSON line: `shape` or `measure`. Fake
tensors have a shape, a dtype and a storage, but no memory, so that a model of any size runs forward and backward. A
dispatch mode counts storages as they are made and freed. The pass runs at three sizes. For each moment, a linear system
gives the bytes as a function of the tokens and of the gathered keys.

memory.py adds the LM head, the optimizer and the allocator. Changes torch: run it only in a separate process.
"""

import json
import re
import sys
from inspect import signature
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, DynamicCache, GenerationMixin

from grpo_math.errors import first_line
from grpo_math.generation.models import context_length, longest_width
from grpo_math.generation.names import cache_name, experts_per_token
from grpo_math.packing import attention, recurrent, varlen
from grpo_math.packing.pack import GroupLayout
from grpo_math.planner import fake
from grpo_math.planner.fake import AllocationRecorder
from grpo_math.planner.layers import Json, build, decoder_layers, first_layers, layer_kind, prepared
from grpo_math.planner.work import Work
from grpo_math.trainer import tiled_mlp

# (prompt, completion) of a packed row with two completions, for one tile of tokens: the sizes (1, tokens, keys) are
# linearly independent, and the number of tiles stays as requested up to three times these sizes.
POINTS = ((512, 256), (256, 384), (640, 320))
# (rows, tokens of a row) of the passes without gradients, whose sizes are linearly independent too.
PREFILLS = ((1, 1024), (1, 1280), (2, 512))

Segments = list[list[int]]  # live bytes at the start of each segment of a pass, and after each allocation


def packed(row: list[list[Any]]) -> Json:
    """Return the trainer's arguments of the model for a packed row."""
    layouts, start = [], 0
    for prompt, lengths in row:
        layouts.append(GroupLayout(start, prompt, tuple(lengths)))
        start += prompt + sum(lengths)
    return {
        "input_ids": torch.zeros(1, start, dtype=torch.long),
        "position_ids": torch.arange(start)[None],
        # transformers passes on a mask of four dimensions unchanged. Packed attention ignores a mask with one element.
        "attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool),
        "packed_groups": tuple(layouts),
    }


def update(model: Any, row: Any, autocast: bool) -> tuple[Segments, Segments]:
    """Return the segments of a forward pass and of a backward pass.

    A forward segment begins before each layer, and at the end. A backward segment begins at the start, before each
    layer from the last, and before the embedding.
    """
    arguments = packed(row)
    # Each request has its own FakeTensorMode. torch refuses to mix tensors of two modes.
    varlen.sequences.cache_clear()
    index = varlen.sequences(arguments["packed_groups"], torch.device("cpu"))[1]
    live = AllocationRecorder(
        model, [index, arguments["input_ids"], arguments["position_ids"], arguments["attention_mask"]]
    )

    def watch(module: Any, args: Any, out: Any) -> None:
        # A tensor's gradient is complete when the layer that reads the tensor has run backward.
        (out[0] if isinstance(out, tuple) else out).register_hook(live.mark)

    layers = decoder_layers(model)[1]
    # A mark after a layer would count the layer's input, which the model's loop over the layers has not yet dropped.
    hooks = [layer.register_forward_pre_hook(live.mark) for layer in layers]
    hooks += [module.register_forward_hook(watch) for module in (model.get_input_embeddings(), *layers)]
    with live:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            # The sum takes the place of the LM head and the loss, and keeps nothing.
            end = model.base_model(**arguments, use_cache=False)[0].sum()
            live.mark()
        # Checkpointing calls the layers again in the backward pass, which must not add marks.
        for hook in hooks:
            hook.remove()
        # Leaving autocast has freed the 16-bit copies of weights that autocast had cached.
        live.mark()
        end.backward()
    start = len(layers) + 2
    return live.segments[1:start], live.segments[start:]


def moments(model: Any, times: list[int], row: Any, autocast: bool) -> Segments:
    """Return live bytes of the whole model without the stored tensors: [at the end of the forward pass], [at the start
    of the backward pass], and at each allocation of each segment.

    The pass has the first layers of the model only. ``times``: how many layers each of them represents.
    """
    forward, backward = update(model, row, autocast)
    # Live bytes at the start of each segment.
    before, behind = ([segment[0] for segment in segments] for segments in (forward, backward))
    # The layers that the model lacks would keep these bytes in the forward pass, and free these in the backward pass.
    kept, freed = extrapolate(times[:-1], before[:-1]), -extrapolate(times[::-1], behind[1:])
    # Each layer runs backward as if it were the last layer, when no other layer has freed anything.
    starts = [behind[0] + freed, *[behind[1] + freed] * len(times), behind[-1]]
    moved = [[now + kept for now in segment] for segment in forward]
    moved += [[now - segment[0] + start for now in segment] for start, segment in zip(starts, backward, strict=True)]
    return [[before[-1] + kept], [behind[0] + freed], *moved]


def extrapolate(times: list[int], bytes_at: list[int]) -> int:
    """Return the bytes that the represented layers add. ``bytes_at``: live bytes before each layer."""
    added = (after - before for before, after in pairwise(bytes_at))
    return sum((count - 1) * size for count, size in zip(times, added, strict=True))


def prefill(
    model: Any, times: list[int], rows: int, length: int, autocast: bool, cache: DynamicCache | None = None
) -> Segments:
    """Return live bytes without stored tensors at each allocation of each layer, in a pass without gradients.

    ``times``: as in `moments`. The pass fills a ``cache``, and counts it.
    """
    live, ids = AllocationRecorder(model, []), torch.zeros(rows, length, dtype=torch.long)
    hooks = [layer.register_forward_pre_hook(live.mark) for layer in decoder_layers(model)[1]]
    with torch.no_grad(), live, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        arguments: Json = {"input_ids": ids, "position_ids": ids}
        # Prompts are padded, so transformers builds a mask of all pairs of tokens.
        if not recurrent.stateful(model):
            arguments["attention_mask"] = torch.zeros(rows, 1, length, length, dtype=torch.bool)
        # The model may be wrapped by peft, which hides its arguments.
        name = cache_name(signature(GenerationMixin.prepare_inputs_for_generation).parameters)
        model.base_model(**arguments, **{name: cache}, use_cache=cache is not None)
    for hook in hooks:
        hook.remove()
    segments = live.segments[1:]
    # Autocast keeps the 16-bit copies of an adapter until the end of the pass.
    added = extrapolate(times[:-1], [segment[0] for segment in segments])
    return [[now + added for now in segment] for segment in segments]


def cached(model: Any, times: list[int], length: int) -> int:
    """Return the bytes of the cache of a sequence."""
    cache = DynamicCache(config=model.config.get_text_config())
    prefill(model, times, 1, length, False, cache)
    sizes = []
    for layer in cache.layers:
        storages = [t.untyped_storage() for t in tree_leaves(list(vars(layer).values())) if torch.is_tensor(t)]
        # Views of one storage count once.
        sizes.append(sum({storage._cdata: storage.nbytes() for storage in storages}.values()))
    # The last layers may have no cache of their own.
    return sum(count * size for count, size in zip(times, sizes, strict=False))


# Answers about a model


def fitted(runs: list[Segments], sizes: list[Any]) -> list[list[list[float]]]:
    """Fit bytes = a + b * tokens + c * keys for each allocation of each segment. If the runs have different
    allocations, fit only the highest one of a segment."""
    answer = []
    for segments in zip(*runs, strict=True):
        same = len({len(segment) for segment in segments}) == 1
        values = np.array(segments if same else [[max(segment)] for segment in segments], dtype=float)
        # A single run has many solutions. The one of least norm is exact at the sizes of this run.
        answer.append(np.linalg.lstsq(np.array(sizes, dtype=float), values)[0].T.round(1).tolist())
    return answer


def upper_envelope(segments: list[list[list[float]]], least: int) -> list[list[float]]:
    """Return the moments that are the highest for some point of a grid of sizes around ``least`` tokens."""
    lines = [line for segment in segments for line in segment]
    tokens = [least * factor for factor in (0.1, 0.3, 1.0, 1.25, 2.0, 4.0, 16.0)]
    grid = [[1.0, t, t * keys] for t in tokens for keys in (1.0, 1.5, 2.5, 5.0, 20.0, 200.0, 2000.0)]
    return sorted(lines[position] for position in {*np.argmax(np.array(lines) @ np.array(grid).T, axis=0)})


def reduced_model(config: Any) -> tuple[Any, Any, list[int]]:
    """Return the whole model in bfloat16, the config of its first layers, and how many layers each of them represents.

    Kinds "window, window, full, window, window, full" are represented by the first four: [1, 2, 2, 1].
    """
    whole = build(config, torch.bfloat16)
    kinds = [layer_kind(layer) for layer in decoder_layers(whole)[1]]
    less = first_layers(config, kinds)
    n = less.num_hidden_layers
    times = [1] * n
    for kind in kinds[n:]:
        # The last layer but one of a kind represents the layers after it.
        times[max(at for at in range(n - 1) if kinds[at] == kind)] += 1
    return whole, less, times


def measure_model(config: Any, how: Json) -> Json:
    """Return bytes without the stored tensors, per (1, tokens, keys) of a packed row or of the ``row`` in ``how``.

    ``forward`` is at the end of the forward pass, ``backward`` at the start of the backward pass, and ``moments`` are
    the allocations that can be the highest. ``trained``: elements that a run with an adapter trains, first those that
    do not depend on its rank. ``prefill``: the highest moments of a pass without gradients or cache, per (1, tokens,
    queries x keys).
    """
    _, less, times = reduced_model(config)
    model = prepared(less, how)
    n, autocast = how["tiles"], how["autocast"]
    rows = [how["row"]]
    if how["row"] is None:
        rows = [[(prompt * n, [tokens * n] * 2)] for prompt, tokens in POINTS]
    sizes = [Work(row).sizes for row in rows]
    end, start, *segments = fitted([moments(model, times, row, autocast) for row in rows], sizes)
    alone = [(1, rows * length * n, rows * (length * n) ** 2) for rows, length in PREFILLS]
    prefills = fitted([prefill(model, times, rows, length * n, autocast) for rows, length in PREFILLS], alone)
    trained = [0, 0]
    for name, parameter in model.named_parameters():
        if how["lora"] and parameter.requires_grad:
            number = re.search(rf"{decoder_layers(model)[0]}\.(\d+)\.", name)
            # memory.py scales these tensors to the recipe's rank. A magnitude of DoRA does not depend on the rank.
            adapts = "lora_" in name and "magnitude" not in name
            trained[adapts] += parameter.numel() * (times[int(number[1])] if number else 1)
    return {
        "forward": end[0],
        "backward": start[0],
        "moments": upper_envelope(segments, sizes[0][1]),
        "trained": trained,
        "prefill": upper_envelope(prefills, alone[0][1]),
    }


def shape(config: Any) -> Json:
    """Return the shapes of the whole model, the fields of `model.Shape`."""
    whole, less, times = reduced_model(config)
    if reason := attention.unsupported(whole.config, whole._supports_sdpa):
        raise NotImplementedError(f"updates are not packed: {reason}")
    text, head = whole.config.get_text_config(), whole.get_output_embeddings()
    parameters = list(whole.parameters())
    sizes = {}
    for path, module in whole.named_modules():
        if type(module) is torch.nn.Linear and module is not head:
            sizes[path] = module.weight.numel()
    model = prepared(less, {"stream": 2, "lora": None, "checkpointing": False})
    # One packed update shows which kernels the model's attention needs, for the field linear.
    attention.kernels_used.clear()
    update(model, [(64, [64, 64])], False)
    # Two lengths separate the constant part of a cache from the part per token. An element has two bytes.
    few, many = (cached(model, times, length) for length in (64, 128))
    # transformers stacks the experts of a layer in one tensor of three dimensions. A token goes through some of them.
    used = experts_per_token(text)
    idle = sum(p[used:].numel() for p in parameters if p.dim() == 3)
    total = sum(p.numel() for p in parameters)
    longest = longest_width(whole.config)
    return {
        "layers": sum(times),
        "hidden": text.hidden_size,
        "heads": getattr(text, "num_attention_heads", 1),
        "vocab": head.out_features,
        "tied": head.weight is whole.get_input_embeddings().weight,
        "max_tokens": context_length(whole.config),
        "total": total,
        "active": total - idle,
        "matrices": sum(sizes.values()),
        "largest": max(sizes.values()),
        "paths": list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", path) for path in sizes)),
        "cache": [(2 * few - many) // 2, (many - few) // 64 // 2],
        "linear": not recurrent.stateful(whole) and varlen.NAMES[varlen.one_by_one] not in attention.kernels_used,
        "tiled": sum(map(tiled_mlp.can_tile, decoder_layers(model)[1])) == len(times),
        **({"packed": longest} if longest else {}),
    }


def main() -> None:
    """Answer each line of standard input."""
    # Standard output carries the answers only: what else is printed goes to standard error.
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        fields, how = json.loads(line)
        fake.set_up(gpu=not (how and how["cpu"]))
        try:
            # Load the config from a file, because only from_pretrained converts JSON's lists and infinite numbers.
            with TemporaryDirectory() as folder:
                Path(folder, "config.json").write_text(json.dumps(fields))
                config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            with FakeTensorMode(allow_non_fake_inputs=True):
                answer = measure_model(config, how) if how else shape(config)
        except Exception as error:  # a model's code may raise anything on tensors without values
            answer = {"error": f"{type(error).__name__}: {first_line(error)}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
