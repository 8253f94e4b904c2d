"""The first layers of a transformers model, set up as the trainer does, on fake tensors."""

import copy
from operator import attrgetter
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers.initialization import no_init_weights

from grpo_math.generation.models import auto_class
from grpo_math.packing import attention, recurrent
from grpo_math.trainer import tiled_mlp

Json = dict[str, Any]
LAYERS = ("layers", "h", "blocks")  # attribute names of the decoder layers in a model's body
DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by bytes per element


def build(config: Any, dtype: torch.dtype) -> Any:
    """Build the transformers model of a config on fake tensors."""
    # Fake tensors have no values to initialise. Without initialisation, transformers does not tie the weights either.
    with no_init_weights():
        kind = getattr(transformers, auto_class(config.architectures))
        # A copy, because from_config writes the dtype into the config.
        model = kind.from_config(copy.deepcopy(config), dtype=dtype)
    model.tie_weights()
    return model


def decoder_layers(model: Any) -> tuple[str, Any]:
    """Return the name and the list of the decoder layers: the longest list with one of these names."""
    lists = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] in LAYERS]
    return max(lists, key=lambda entry: len(entry[1]))


def layer_kind(layer: Any) -> Any:
    """Return the kind of a layer: its modules and their plain values, without its number, and its shapes."""
    kind: list[Any] = [(name, parameter.shape) for name, parameter in layer.named_parameters()]
    for name, module in layer.named_modules():
        values = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str))}
        values.pop("layer_idx", None)
        kind.append((name, type(module), values))
    return kind


def first_layers(config: Any, kinds: list[Any]) -> Any:
    """Return a text config with as few layers as contain one of each kind, a second one of the first layer's kind, and
    one more. Fields with one entry per layer are cut too.

    The first layers and not a selection, because a model's code derives the kind of a layer from its number. The first
    layer keeps less than a later one of its kind, because the embedding's output is kept anyway. The last one keeps its
    input until the model's loop over the layers has ended.
    """
    text, total = copy.deepcopy(config.get_text_config()), len(kinds)
    again = kinds.index(kinds[0], 1) if kinds[0] in kinds[1:] else 0
    n = min(total, 2 + max(again, *(kinds.index(kind) for kind in kinds)))
    for key, value in vars(text).items():
        if isinstance(value, (list, tuple)) and len(value) == total:
            setattr(text, key, list(value[:n]))
    text.num_hidden_layers = n
    if hasattr(text, "num_kv_shared_layers"):  # the last layers use the cache of an earlier one
        text.num_kv_shared_layers = max(0, n - (total - text.num_kv_shared_layers))
    return text


def cast_to_input(module: Any, args: Any, out: Any) -> Any:
    """Return the output as bitsandbytes' Linear4bit does. Under autocast a LayerNorm's output is float32, so the hidden
    states are float32 from there on."""
    return out.to(args[0].dtype)


def prepared(config: Any, how: Json) -> Any:
    """Return the model of a config, set up as the trainer does: with adapter, checkpointing, packing, tiles."""
    model = build(config, DTYPES[how["stream"]])
    if how["lora"] and how["autocast"] and how["adapter"] == 2:  # a base in 4 bit (memory.precision)
        for module in model.modules():
            if type(module) is torch.nn.Linear:
                module.register_forward_hook(cast_to_input)
    if how["lora"]:
        get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **how["lora"]))
        # The trainer does so with checkpointing only. Here the first layer then counts like the layers after it.
        model.enable_input_require_grads()
    for parameter in filter(attrgetter("requires_grad"), model.parameters()):
        # The dtype that peft or TRL gives the adapter: memory.py derives it from the recipe.
        parameter.data = parameter.data.to(DTYPES[how["adapter" if how["lora"] else "stream"]])
        parameter.grad = torch.zeros_like(parameter)  # as after the first micro-batch
    model.train()
    model.set_attn_implementation(attention.register("sdpa" if model._supports_sdpa else "eager"))
    recurrent.fork_states(model)
    if how["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        tiled_mlp.tile_layers([model])
    return model
