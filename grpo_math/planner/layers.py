"""The first layers of a transformers model, set up as the trainer does, on fake tensors.

Does not run the model.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from grpo_math.trainer import attention, recurrent, tiled_mlp

Json = dict[str, Any]
LAYERS = ("layers", "h", "blocks")  # attribute names of the decoder layers in a model's body


def config_of(given: Json) -> Any:
    fields = {name: value for name, value in given.items() if name not in ("model_type", "quantization_config")}
    return AutoConfig.for_model(given["model_type"], **fields)


def build(config: Any, dtype: torch.dtype) -> Any:
    """Build the transformers model of a config on fake tensors."""
    # Fake tensors have no values to initialise. Without initialisation, transformers does not tie the weights either.
    with no_init_weights():
        # A copy, because from_config writes the dtype into the config.
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    model.tie_weights()
    return model


def layers_of(model: Any) -> tuple[str, Any]:
    """Return the name and the list of the decoder layers: the longest list with one of these names."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    return max((entry for entry in lists if entry[0].split(".")[-1] in LAYERS), key=lambda entry: len(entry[1]))


def kind_of(layer: Any) -> Any:
    """Return the kind of a layer: its modules, shapes and plain values, without its number."""

    def plain(module: Any) -> Any:
        values = ((k, v) for k, v in vars(module).items() if k not in ("layer_idx", "training"))
        return tuple(sorted((k, v) for k, v in values if isinstance(v, (int, float, bool, str))))

    return tuple(
        (
            name,
            type(module).__name__,
            plain(module),
            tuple((k, tuple(p.shape)) for k, p in module._parameters.items() if p is not None),
        )
        for name, module in layer.named_modules()
    )


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


def prepared(config: Any, how: Json) -> Any:
    """Return the model of a config, set up as the trainer does: with adapter, checkpointing, packing, tiles."""
    base = model = build(config, torch.bfloat16 if how["stream"] == 2 else torch.float32)
    if how["lora"]:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **how["lora"]))
        # The dtype that peft or TRL gives the adapter: memory.py derives it from the recipe.
        adapter = torch.bfloat16 if how["adapter"] == 2 else torch.float32
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(adapter)
        # The trainer does so with checkpointing only. Here the first layer then counts like the layers after it.
        model.enable_input_require_grads()
    model.train()
    if how["checkpointing"]:
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
        )
    plain = "sdpa" if base._supports_sdpa else "eager"
    base.set_attn_implementation(attention.register(plain))
    recurrent.fork_states(base)
    # The first packed pass compares two outputs to verify a layer. Fake tensors have no values to compare.
    recurrent.verified.update(type(module) for module in recurrent.stateful(base))
    if how["checkpointing"]:
        tiled_mlp.set_up([model])
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)  # as after the first micro-batch
    return model


def stored(model: Any) -> list[Tensor]:
    return [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
