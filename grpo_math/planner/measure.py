"""Measure a model's memory from its config.json: layers of each kind of its class, on tensors without memory.

`python -m grpo_math.planner.measure` answers each line with a JSON request by one JSON line: `shape` or `measure`. Fake
tensors have a shape, a dtype and a storage, but no memory, so that a model of any size runs forward and backward. A
dispatch mode counts storages as they are made and freed. The pass runs at three sizes. For each moment, a linear system
gives the bytes as a function of the tokens and of the gathered keys.

Does not count the LM head, the optimizer or the allocator: memory.py does. Changes torch: run it only in a separate
process.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from grpo_math.errors import first_line
from grpo_math.planner import fake
from grpo_math.planner.fake import Head, Live
from grpo_math.planner.layers import build, config_of, first_layers, kind_of, layers_of, prepared, stored
from grpo_math.trainer import attention, recurrent, tiled_mlp, varlen
from grpo_math.trainer.packing import GroupLayout

Json = dict[str, Any]

# (prompt, completion) of a packed row with two completions, for one tile of tokens: the sizes (1, tokens, keys) are
# linearly independent, and the number of tiles stays as requested up to three times these sizes.
POINTS = ((512, 256), (256, 384), (640, 320))

Sizes = list[float]


class Marks:
    """Points of a pass: the live bytes at each point, and the number of allocations before it."""

    def __init__(self, live: Live) -> None:
        self.live, self.now, self.positions = live, list[int](), list[int]()

    def __call__(self, *args: Any) -> None:
        self.now.append(self.live.now)
        self.positions.append(len(self.live.trace))

    def above(self, number: int) -> list[int]:
        """Return the live bytes at each allocation between this mark and the next, minus those at this mark."""
        start, end = self.positions[number : number + 2]
        return [0, *(now - self.now[number] for now in self.live.trace[start:end])]


def packed(groups: list[Json]) -> tuple[Json, list[Tensor]]:
    """Return the trainer's arguments of the model for a packed row, and their tensors."""
    layouts, start = [], 0
    for group in groups:
        layouts.append(GroupLayout(start, group["prompt"], tuple(group["lengths"])))
        start += group["prompt"] + sum(group["lengths"])
    # Each request has its own FakeTensorMode. torch refuses to mix tensors of two modes.
    varlen.sequences.cache_clear()
    index = varlen.sequences(tuple(layouts), torch.device("cpu"))[1]
    # transformers passes on a mask of four dimensions as it is, and packed attention ignores one of a single element.
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    given: Json = {"input_ids": torch.zeros(1, start, dtype=torch.long), "position_ids": torch.arange(start)[None]}
    return {**given, "attention_mask": mask, "packed_groups": tuple(layouts)}, [*given.values(), mask, index]


def update(model: Any, how: Json, row: Any) -> tuple[Marks, Marks]:
    """Return marks of a forward pass (before each layer, after the last, after the norm, after autocast) and of a
    backward pass (at the start, after the norm, before each layer from the last, at the end)."""
    base = model.get_base_model() if how["lora"] else model
    given, inputs = packed(row)
    live = Live([*stored(model), *inputs])
    forward, backward, layers = Marks(live), Marks(live), layers_of(base)[1]

    def boundary(states: Any) -> None:
        forward()
        states = states[0] if isinstance(states, tuple) else states
        # A tensor's gradient is complete when the layer that reads the tensor has run backward.
        states.register_hook(backward)

    def before(module: Any, args: Any, given: Any) -> None:
        boundary(args[0] if args else given["hidden_states"])

    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(lambda module, args, out: boundary(out)))
    with live:
        with torch.autocast("cpu", torch.bfloat16, enabled=how["autocast"]):
            end = Head.apply(base.base_model(**given, use_cache=False)[0])
            forward()
        # Leaving autocast frees the 16-bit copies of weights that autocast has cached.
        forward()
        # Checkpointing calls the layers again in the backward pass, which must not add marks.
        for hook in hooks:
            hook.remove()
        backward()
        end.backward()
        backward()
    return forward, backward


def moments(model: Any, how: Json, times: list[int], row: Any) -> list[list[int]]:
    """Return live bytes of the whole model without the stored tensors: [at the end of the forward pass], [at the start
    of the backward pass], and at each allocation of each stretch.

    The pass has the first layers of the model only. ``times``: how many layers each of them represents.
    """
    forward, backward = update(model, how, row)
    n, f, b = len(times), forward.now, backward.now
    kept = [f[at + 1] - f[at] for at in range(n)]
    left = [b[n - at] - b[n - at + 1] for at in range(n)]
    more_kept, more_left = (
        sum((count - 1) * size for count, size in zip(times, sizes, strict=True)) for sizes in (kept, left)
    )
    stretches = [[f[n + 1] + more_kept], [b[0] + more_left]]
    # Forward, as if the layer were the last of all.
    for at in range(n):
        before = f[n] - sum(kept[at:]) + more_kept
        stretches.append([before + above for above in forward.above(at)])
    stretches.append([b[0] + more_left + above for above in backward.above(0)])
    # Backward, as if the layer were the last of all.
    for at in range(n):
        stretches.append([b[1] + more_left + above for above in backward.above(n - at)])
    stretches.append([b[n + 1] + above for above in backward.above(n + 1)])
    return stretches


def prefill(model: Any, how: Json, times: list[int], rows: int, length: int) -> tuple[list[list[int]], list[int]]:
    """Return live bytes without stored and cached tensors at each allocation of each layer, and each layer's cache.

    ``times``: as in `moments`.
    """
    base = model.get_base_model() if how["lora"] else model
    live, sizes = Live(stored(model)), []
    forward, layers = Marks(live), layers_of(base)[1]
    hooks = [layer.register_forward_pre_hook(forward) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(forward))
    cache = DynamicCache(config=base.config.get_text_config())
    ids = torch.zeros(rows, length, dtype=torch.long)
    with torch.no_grad(), live, torch.autocast("cpu", torch.bfloat16, enabled=how["autocast"]):
        given: Json = {"input_ids": ids, "position_ids": ids}
        # Prompts are padded, so transformers builds a mask of all pairs of tokens.
        if not recurrent.stateful(base):
            given["attention_mask"] = torch.zeros(rows, 1, length, length, dtype=torch.bool)
        base.base_model(**given, past_key_values=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    for layer in cache.layers:
        held = [tensor for tensor in tree_leaves(list(vars(layer).values())) if isinstance(tensor, Tensor)]
        # Views of one storage count once.
        sizes.append(sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values()))
    # Layers that share another layer's cache have no cache.
    sizes += [0] * (len(layers) - len(sizes))
    # Autocast keeps the 16-bit copies of an adapter until the end of the pass.
    grown = [after - before for before, after in pairwise(forward.now)]
    more = sum((count - 1) * (size - cached) for count, size, cached in zip(times, grown, sizes, strict=True))
    before = [forward.now[n] - sum(sizes[:n]) + more for n in range(len(layers))]
    return [[before[n] + above for above in forward.above(n)] for n in range(len(layers))], sizes


# Answers about a model


def fitted(runs: list[list[list[int]]], features: list[Sizes]) -> list[list[Sizes]]:
    """Return the moments of each stretch as bytes per feature. If the runs have different allocations, or there is only
    one run, use only the highest moment of a stretch."""
    if len(runs) == 1:
        return [[[float(max(stretch)), *[0.0] * (len(features[0]) - 1)]] for stretch in runs[0]]
    answer = []
    for stretches in zip(*runs, strict=True):
        same = len({len(stretch) for stretch in stretches}) == 1
        values = np.array(stretches if same else [[max(stretch)] for stretch in stretches], dtype=float)
        answer.append(np.linalg.solve(np.array(features), values).T.round(2).tolist())
    return answer


def highest(stretches: list[list[Sizes]], features: list[Sizes]) -> list[Sizes]:
    """Return the moments that are the highest for some point of a grid of sizes."""
    lines, least = [line for stretch in stretches for line in stretch], features[0][1]
    tokens = [least * factor for factor in (0.1, 0.3, 1.0, 1.25, 2.0, 4.0, 16.0)]
    grid = [[1.0, t, t * more] for t in tokens for more in (1.0, 1.5, 2.5, 5.0, 20.0, 200.0, 2000.0)]
    positions = set(np.argmax(np.array(lines) @ np.array(grid).T, axis=0).tolist())
    return sorted(lines[position] for position in positions)


def first(config: Any) -> tuple[Any, Any, list[int]]:
    """Return the whole model in bfloat16, the config of its first layers, and how many layers each of them represents.

    >>> repeats(["window", "window", "full", "window", "window", "full"], 4)
    [1, 2, 2, 1]
    """
    whole = build(config, torch.bfloat16)
    kinds = [kind_of(layer) for layer in layers_of(whole)[1]]
    less = first_layers(config, kinds)
    return whole, less, repeats(kinds, less.num_hidden_layers)


def repeats(kinds: list[Any], n: int) -> list[int]:
    times = [1] * n
    for kind in kinds[n:]:
        # The last layer but one of a kind represents the layers after it.
        times[max(at for at in range(n - 1) if kinds[at] == kind)] += 1
    return times


def measure(config: Any, how: Json) -> Json:
    """Return bytes without the stored tensors, per (1, tokens, keys) of a packed row or of the ``row`` in ``how``.

    ``forward`` is at the end of the forward pass, ``backward`` at the start of the backward pass, and ``moments`` are
    those that can be the highest. ``trained``: [elements, of an adapter, count] of the tensors that a run with an
    adapter trains. ``prefill``: the highest moments of a pass without gradients, per (1, tokens, queries x keys).
    """
    n = how["tiles"]
    _, less, times = first(config)
    model = prepared(less, how)
    rows = [how["row"]]
    if how["row"] is None:
        rows = [[{"prompt": prompt * n, "lengths": [completion * n] * 2}] for prompt, completion in POINTS]
    features = [[1.0, float(p + 2 * c) * n, float(3 * p + 2 * c) * n] for p, c in POINTS]
    end, start, *stretches = fitted([moments(model, how, times, row) for row in rows], features)
    sizes = [(1, 1024 * n), (1, 1280 * n), (2, 512 * n)]
    alone = [[1.0, float(rows * length), float(rows * length**2)] for rows, length in sizes]
    prefills = fitted([prefill(model, how, times, *size)[0] for size in sizes], alone)
    trained, layers = Counter[tuple[int, bool]](), layers_of(model)[0]
    for name, parameter in model.named_parameters() if how["lora"] else ():
        if parameter.requires_grad:
            within = name.partition(f"{layers}.")[2]
            # memory.py scales these tensors to the recipe's rank. A magnitude of DoRA does not depend on the rank.
            adapts = "lora_" in name and "magnitude" not in name
            trained[parameter.numel(), adapts] += times[int(within.partition(".")[0])] if within else 1
    return {
        "forward": end[0],
        "backward": start[0],
        "moments": highest(stretches, features),
        "trained": [[size, adapts, count] for (size, adapts), count in sorted(trained.items())],
        "prefill": highest(prefills, alone),
    }


def shape(config: Any) -> Json:
    """Return the shapes of the whole model. ``cache``: elements cached for a sequence, constant and per token."""
    whole, less, times = first(config)
    if reason := attention.unsupported(whole.config, whole._supports_sdpa):
        raise NotImplementedError(f"updates are not packed: {reason}")
    text, head, name = whole.config.get_text_config(), whole.get_output_embeddings(), layers_of(whole)[0]
    linears: Counter[tuple[str, int, int]] = Counter()
    for path, module in whole.named_modules():
        if type(module) is torch.nn.Linear and module is not head:
            within = path.removeprefix(name + ".").partition(".")[2] if path.startswith(name) else path
            linears[within, module.in_features, module.out_features] += 1
    how: Json = {"stream": 2, "lora": None, "checkpointing": False, "autocast": False}
    model = prepared(less, how)
    # One packed update shows which kernels the model's attention needs, for the field linear.
    attention.kernels_used.clear()
    update(model, how, [{"prompt": 64, "lengths": [64, 64]}])
    # Two lengths separate the constant part of a cache from the part per token. An element has two bytes.
    few, many = (prefill(model, how, times, 1, length)[1] for length in (64, 128))
    constant = per_token = 0
    for count, a, b in zip(times, few, many, strict=True):
        constant, per_token = constant + count * (2 * a - b) // 2, per_token + count * (b - a) // 64 // 2
    parameters = list(whole.parameters())
    total = sum(p.numel() for p in parameters)
    # transformers stacks the experts of a layer in one tensor of three dimensions. A token goes through some of them.
    stacked = sum(p.numel() for p in parameters if p.dim() == 3)
    experts = max((p.size(0) for p in parameters if p.dim() == 3), default=1)
    used = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or 1
    return {
        "family": config.model_type,
        "layers": sum(times),
        "hidden": text.hidden_size,
        "heads": getattr(text, "num_attention_heads", 1),
        "vocab": head.out_features,
        "tied": head.weight is whole.get_input_embeddings().weight,
        "max_tokens": getattr(text, "max_position_embeddings", None),
        "total": total,
        "active": total - stacked + stacked * used // experts,
        "tensors": sorted(Counter(p.numel() for p in parameters).items()),
        "linears": [[*linear, count] for linear, count in linears.items()],
        "cache": [constant, per_token],
        "linear": not recurrent.stateful(whole) and varlen.NAMES[varlen.one_by_one] not in attention.kernels_used,
        "tiled": sum(map(tiled_mlp.serves, layers_of(model)[1])) == len(times),
    }


def main() -> None:
    """Answer each line of standard input."""
    # Standard output carries the answers only: what else is printed goes to standard error.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        how = request["how"]
        fake.set_up(gpu=not (how and how["cpu"]))
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                config = config_of(request["config"])
                answer = measure(config, how) if how else shape(config)
        except Exception as error:  # a model's code may raise anything on tensors without values
            answer = {"error": f"{type(error).__name__}: {first_line(error)}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
