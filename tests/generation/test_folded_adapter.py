"""A LoRA while a model generates: peft's logits by two operators a layer, and only for layers that are plain."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from small_generation import small_model
from torch import nn

from grpo_math.generation.folded_adapter import FoldedLayer, folded_adapter

IDS = torch.arange(5, 45).view(4, 10)


def adapted(**settings):
    torch.manual_seed(0)
    config = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", "init_lora_weights": False, **settings}
    return get_peft_model(small_model(), LoraConfig(**config)).eval()


def folded(model):
    """The number of layers that are folded, of those with an adapter."""
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    return sum(isinstance(vars(layer).get("forward"), FoldedLayer) for layer in layers), len(layers)


@pytest.mark.parametrize(
    ("dtype", "autocast", "difference"),
    [(torch.float32, False, 1e-5), (torch.bfloat16, False, 0.1), (torch.float32, True, 0.1)],
)
@torch.no_grad()
def test_the_logits_are_those_of_peft_in_each_format(dtype, autocast, difference):
    model = adapted()
    model.get_base_model().to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = model(IDS).logits
        with folded_adapter(model):
            done, layers = folded(model)
            logits = model(IDS).logits
        with model.disable_adapter():
            base = model(IDS).logits
    assert done == layers > 0
    assert logits.dtype == expected.dtype
    assert (logits - expected).abs().max() < difference * (expected - base).abs().max()
    assert folded(model)[0] == 0


def test_an_exception_leaves_the_layers_of_peft():
    model = adapted()
    with pytest.raises(ValueError, match="of the user"), folded_adapter(model):
        raise ValueError("of the user")
    assert folded(model)[0] == 0


def two_adapters(model):
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter(["default", "other"])


def hook_in(model):
    next(layer for layer in model.modules() if isinstance(layer, Linear)).lora_A.default.register_forward_hook(print)


def forward_on(model):
    layer = next(layer for layer in model.modules() if isinstance(layer, Linear))
    layer.base_layer.forward = nn.Linear.forward.__get__(layer.base_layer)


@pytest.mark.parametrize(
    ("settings", "change", "left"),
    [
        ({"use_dora": True}, None, "all"),
        ({"lora_bias": True}, None, "all"),
        ({"lora_dropout": 0.5}, nn.Module.train, "all"),
        ({"lora_dropout": 0.5}, None, 0),
        ({}, two_adapters, "all"),
        ({}, lambda model: model.merge_adapter(), "all"),
        ({}, lambda model: model.base_model.disable_adapter_layers(), "all"),
        ({}, hook_in, 1),
        ({}, forward_on, 1),
    ],
    ids=["dora", "bias", "dropout", "dropout off", "two", "merged", "disabled", "hook", "forward"],
)
def test_layers_that_are_more_than_a_lora_stay_those_of_peft(settings, change, left):
    model = adapted(**settings)
    if change:
        change(model)
    with folded_adapter(model):
        done, layers = folded(model)
    assert layers - done == (layers if left == "all" else left)
