"""Measure a model's memory from its config.json: its own class, one layer of each kind, on tensors without memory.

`python -m grpo_math.planner.measure` answers one JSON request a line with one JSON line: `shape` or `measure`. Fake
tensors have a shape, a dtype and a storage, but no memory, so that a model of any size runs forward and backward. A
dispatch mode counts storages as they come and go. The pass runs at three sizes, and a linear system for each moment
gives the bytes as a function of the tokens and of the gathered keys.

Does not know the LM head, the optimizer, or the allocator: memory.py does. Changes torch: for a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
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
from grpo_math.planner.layers import build, config_of, kind_of, layers_of, prepared, stored
from grpo_math.trainer import attention, recurrent, tiled_mlp, varlen
from grpo_math.trainer.packing import GroupLayout

Json = dict[str, Any]

# (prompt, completion) of a packed row with two completions, for one tile of tokens: the sizes (1, tokens, keys) are
# linearly independent, and up to three times these sizes the number of tiles stays as asked.
POINTS = ((512, 256), (256, 384), (640, 320))

Sizes = list[float]


class Marks:
    """Points of a pass: what was live there, and how many allocations came before."""

    def __init__(self, live: Live) -> None:
        self.live, self.now, self.place = live, list[int](), list[int]()

    def __call__(self, *args: Any) -> None:
        self.now.append(self.live.now)
        self.place.append(len(self.live.trace))

    def above(self, number: int) -> list[int]:
        """What was live at each allocation between this mark and the next, above what was live at this one."""
        start, end = self.place[number : number + 2]
        return [0, *(now - self.now[number] for now in self.live.trace[start:end])]


def packed(groups: list[Json]) -> tuple[Json, list[Tensor]]:
    """What the trainer gives to the model for a packed row, and the tensors of that."""
    layouts, start = [], 0
    for group in groups:
        layouts.append(GroupLayout(start, group["prompt"], tuple(group["lengths"])))
        start += group["prompt"] + sum(group["lengths"])
    varlen.sequences.cache_clear()
    index = varlen.sequences(tuple(layouts), torch.device("cpu"))[1]
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    given: Json = {"input_ids": torch.zeros(1, start, dtype=torch.long), "position_ids": torch.arange(start)[None]}
    return {**given, "attention_mask": mask, "packed_groups": tuple(layouts)}, [*given.values(), mask, index]


def padded(rows: int, length: int) -> tuple[Json, list[Tensor]]:
    """And for rows with padding, whose mask every layer spells out."""
    mask = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    ids = torch.zeros(rows, length, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": mask}, [ids, mask]


def update(model: Any, how: Json, row: Any) -> tuple[Marks, Marks]:
    """Marks of a forward pass (before each layer, behind the last, behind the norm, behind autocast) and of a backward
    pass (at the start, behind the norm, before each layer from the last, at the end)."""
    base = model.get_base_model() if how["lora"] else model
    given, inputs = packed(row) if how["packed"] else padded(*row)
    live = Live([*stored(model), *inputs])
    forward, backward, layers = Marks(live), Marks(live), layers_of(base)[1]

    def boundary(states: Any) -> None:
        forward()
        states = states[0] if isinstance(states, tuple) else states
        if states.requires_grad:
            states.register_hook(backward)

    def before(module: Any, args: Any, given: Any) -> None:
        boundary(args[0] if args else given["hidden_states"])

    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(lambda module, args, out: boundary(out)))
    with live:
        with torch.autocast("cpu", torch.bfloat16, enabled=how["autocast"]):
            end = Head.apply(base.base_model(**given, use_cache=False)[0])
            forward()
        forward()
        for hook in hooks:  # the layers are called again when they are recomputed
            hook.remove()
        backward()
        end.backward()
        backward()
    return forward, backward


def moments(model: Any, how: Json, kinds: list[Any], chosen: list[int], row: Any) -> list[list[int]]:
    """Live bytes of the whole model above what is stored, from a pass of the cut one: [at the end of the forward pass],
    [at the start of the backward pass], and stretch by stretch at every allocation."""
    forward, backward = update(model, how, row)
    n, f, b = len(chosen), forward.now, backward.now
    kept = {kinds[i]: f[place + 1] - f[place] for place, i in enumerate(chosen)}
    left = {kinds[i]: b[n - place] - b[n - place + 1] for place, i in enumerate(chosen) if place or len(b) == n + 3}
    left = {**kept, **left}
    counts, there = Counter(kinds), Counter(kinds[i] for i in chosen)
    more_kept = sum(kept[kind] * (counts[kind] - there[kind]) for kind in counts)
    more_left = sum(left[kind] * (counts[kind] - there[kind]) for kind in counts)
    found = [[f[n + 1] + more_kept], [b[0] + more_left]]
    for place in range(n):  # forward, as if the layer were the last of all
        later = sum(kept[kinds[i]] for i in chosen[place:])
        found.append([f[n] - later + more_kept + above for above in forward.above(place)])
    found.append([b[0] + more_left + above for above in backward.above(0)])
    for place in range(n):
        number = n - place  # the stretch of this layer, in a backward pass
        base = b[1] + more_left
        found.append([base + above for above in backward.above(number)])
    if len(b) == n + 3:
        found.append([b[n + 1] + above for above in backward.above(n + 1)])
    return found


def prefill(model: Any, how: Json, rows: int, length: int) -> tuple[list[list[int]], list[int]]:
    """(Live bytes above what is stored and cached at every allocation of each layer, bytes that each layer caches)."""
    base = model.get_base_model() if how["lora"] else model
    live, sizes = Live(stored(model)), []
    forward, layers = Marks(live), layers_of(base)[1]
    hooks = [layer.register_forward_pre_hook(forward) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(forward))
    cache = DynamicCache(config=base.config.get_text_config())
    ids = torch.zeros(rows, length, dtype=torch.long)
    with torch.no_grad(), live, torch.autocast("cpu", torch.bfloat16, enabled=how["autocast"]):
        given: Json = {"input_ids": ids, "position_ids": ids}
        if not recurrent.stateful(base):  # prompts are padded
            given["attention_mask"] = torch.zeros(rows, 1, length, length, dtype=torch.bool)
        base.base_model(**given, past_key_values=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    for layer in cache.layers:
        held = [tensor for tensor in tree_leaves(list(vars(layer).values())) if isinstance(tensor, Tensor)]
        sizes.append(sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values()))
    sizes += [0] * (len(layers) - len(sizes))  # layers that share another's
    earlier = [sum(sizes[:n]) for n in range(len(layers))]
    return [[forward.now[n] - earlier[n] + above for above in forward.above(n)] for n in range(len(layers))], sizes


# What is said of a model


def fitted(runs: list[list[list[int]]], features: list[Sizes]) -> list[list[Sizes]]:
    """For each stretch, its moments as bytes per feature. Where the runs do not consist of the same allocations, or one
    run stands alone, a stretch's highest moment stands for all."""
    if len(runs) == 1:
        return [[[float(max(stretch)), *[0.0] * (len(features[0]) - 1)]] for stretch in runs[0]]
    answer = []
    for stretches in zip(*runs, strict=True):
        same = len({len(stretch) for stretch in stretches}) == 1
        values = np.array(stretches if same else [[max(stretch)] for stretch in stretches], dtype=float)
        answer.append(np.linalg.solve(np.array(features), values).T.round(2).tolist())
    return answer


def highest(stretches: list[list[Sizes]], features: list[Sizes]) -> list[Sizes]:
    """The moments that are the fullest anywhere on a grid of sizes."""
    lines, least = [line for stretch in stretches for line in stretch], features[0][1]
    tokens = [least * factor for factor in (0.1, 0.3, 1.0, 1.25, 2.0, 4.0, 16.0)]
    grid = [[1.0, t, t * more] for t in tokens for more in (1.0, 1.5, 2.5, 5.0, 20.0, 200.0, 2000.0)]
    places = set(np.argmax(np.array(lines) @ np.array(grid).T, axis=0).tolist())
    return sorted(lines[place] for place in places)


def kinds_of(config: Any) -> tuple[Any, list[Any], list[int]]:
    """The whole model in bfloat16, the kind of each layer, and the layers to measure: one of each kind, and another of
    the first, whose own input may need no gradient."""
    whole = build(config, torch.bfloat16)
    kinds = [kind_of(layer) for layer in layers_of(whole)[1]]
    places: dict[Any, list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(kind, []).append(place)
    return whole, kinds, sorted({*(numbers[0] for numbers in places.values()), *places[kinds[0]][:2]})


def measure(config: Any, how: Json) -> Json:
    """Bytes above what is stored, per (1, tokens, keys) of a packed row, or of the ``row`` that is asked for: at the
    end of the forward pass, at the start of the backward pass, and at the moments that can be the fullest. ``trained``:
    [elements, of an adapter, count] of what an adapter's run trains. ``prefill``: the fullest moments of a pass without
    gradients, per (1, tokens, products of queries and keys)."""
    n = how["tiles"]
    _, kinds, chosen = kinds_of(config)
    model = prepared(config, kinds, chosen, how)
    rows = [how["row"]]
    if how["row"] is None:
        rows = [[{"prompt": prompt * n, "lengths": [completion * n] * 2}] for prompt, completion in POINTS]
    features = [[1.0, float(p + 2 * c) * n, float(3 * p + 2 * c) * n] for p, c in POINTS]
    end, start, *rest = fitted([moments(model, how, kinds, chosen, row) for row in rows], features)
    sizes = [(1, 1024 * n), (1, 1280 * n), (2, 512 * n)]
    alone = [[1.0, float(rows * length), float(rows * length**2)] for rows, length in sizes]
    prefills = fitted([prefill(model, how, *size)[0] for size in sizes], alone)
    counts, trained = Counter(kinds), Counter[tuple[int, bool]]()
    for name, parameter in model.named_parameters() if how["lora"] else ():
        if parameter.requires_grad:
            place = next((int(part) for part in name.split(".") if part.isdigit()), None)
            times = 1 if place is None else repeats(chosen, kinds, counts, place)
            adapts = "lora_" in name and "magnitude" not in name  # of the adapter's rank
            trained[parameter.numel(), adapts] += times
    return {
        "forward": end[0],
        "backward": start[0],
        "moments": highest(rest, features),
        "trained": [[size, adapts, count] for (size, adapts), count in sorted(trained.items())],
        "prefill": highest(prefills, alone),
    }


def repeats(chosen: list[int], kinds: list[Any], counts: Counter[Any], place: int) -> int:
    """How many layers of the whole model one of the cut model stands for: the first of two alike stands for itself."""
    kind = kinds[chosen[place]]
    alike = [p for p, i in enumerate(chosen) if kinds[i] == kind]
    return counts[kind] - len(alike) + 1 if place == alike[-1] else 1


def shape(config: Any) -> Json:
    """The shapes of the whole model; what its layers cache for a sequence, in elements: constant, and per token."""
    whole, kinds, chosen = kinds_of(config)
    text, head, name = whole.config.get_text_config(), whole.get_output_embeddings(), layers_of(whole)[0]
    linears: Counter[tuple[str, int, int, bool]] = Counter()
    for path, module in whole.named_modules():
        if type(module) is torch.nn.Linear and module is not head:
            within = path.removeprefix(name + ".").partition(".")[2] if path.startswith(name) else path
            linears[within, module.in_features, module.out_features, module.bias is not None] += 1
    how: Json = {
        "stream": 2,
        "four_bit": False,
        "lora": None,
        "checkpointing": False,
        "autocast": False,
        "eager": False,
    }
    model = prepared(config, kinds, chosen, how)
    attention.kernels_used.clear()
    update(model, {**how, "packed": True}, [{"prompt": 64, "lengths": [64, 64]}])
    few, many = (prefill(model, how, 1, length)[1] for length in (64, 128))
    counts, constant, per_token = Counter(kinds), 0, 0
    for place, (a, b) in enumerate(zip(few, many, strict=True)):
        times = repeats(chosen, kinds, counts, place)
        constant, per_token = constant + times * (2 * a - b) // 2, per_token + times * (b - a) // 64 // 2
    parameters = list(whole.parameters())
    stacked = sum(p.numel() for p in parameters if p.dim() == 3)  # the experts of a layer in one tensor
    used = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or 1
    experts = max((p.size(0) for p in parameters if p.dim() == 3), default=1)
    total = sum(p.numel() for p in parameters)
    return {
        "family": config.model_type,
        "layers": len(kinds),
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
        "stateful": bool(recurrent.stateful(whole)),
        "spelled": varlen.NAMES[varlen.one_by_one] in attention.kernels_used,
        "tiled": sum(map(tiled_mlp.serves, layers_of(model)[1])) == len(chosen),
        "packs": attention.unsupported(whole.config, whole._supports_sdpa) is None,
    }


def main() -> None:
    """Answer each line of standard input."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        how = request["how"]
        fake.set_up(gpu=not (how and how["cpu"]))
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                config = config_of(request["config"])
                answer = measure(config, how) if how else shape(config)
        except Exception as error:  # whatever a family's own code raises without numbers
            answer = {"error": f"{type(error).__name__}: {first_line(error)}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
