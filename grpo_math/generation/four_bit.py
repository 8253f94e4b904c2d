"""A base in 4 bit that is shared with vLLM (generation/shared.py): bitsandbytes' layers around vLLM's bytes.

vLLM's loader quantises each weight to nf4 as bitsandbytes does for transformers, and stores the parts of a fused weight
one after the other. It also dequantises the nested constants. So a layer of the policy can use a part of vLLM's bytes
with vLLM's constants of that part, and computes what it would compute on a second copy.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def supports(config: Any) -> bool:
    """Return True if transformers' ``quantization_config`` is what vLLM makes: nf4 with nested constants."""
    in_4bit = getattr(config, "load_in_4bit", False)
    return in_4bit and config.bnb_4bit_quant_type == "nf4" and config.bnb_4bit_use_double_quant


def one_element(shape: Sequence[int], dtype: torch.dtype, device: Any = None) -> Tensor:
    """Return zeros of this shape in the memory of one element."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def quantise(model: Any, config: Any) -> None:
    """Replace linear layers by bitsandbytes' layers, each parameter of which takes the memory of one element."""
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    quantizer = Bnb4BitHfQuantizer(config, pre_quantized=False)
    device, dtypes = model.device, {name: p.dtype for name, p in model.named_parameters()}
    quantizer.preprocess_model(model, device_map=None)
    for name, layer in model.named_modules():
        if hasattr(layer, "quant_state"):
            # bitsandbytes would repack the weights of a CPU with AVX512 in place, and vLLM reads them too.
            layer.support_avx512bf16_for_cpu = False
            # Two values in a byte, in one column.
            set_weight(layer, one_element((layer.weight.numel() // 2, 1), torch.uint8, device), None)
            if layer.bias is not None:
                zeros = one_element(layer.bias.shape, dtypes[f"{name}.bias"], device)
                layer.bias = nn.Parameter(zeros, requires_grad=False)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer


def set_weight(layer: Any, packed: Tensor, constants: Any) -> None:
    """Let a layer of bitsandbytes compute with a ``packed`` weight and its ``constants`` (a `QuantState`)."""
    from bitsandbytes.nn import Params4bit

    layer.quant_state = constants
    layer.weight = Params4bit(packed, quant_state=constants, quant_type="nf4", module=layer, bnb_quantized=True)


def find_constants(views: dict[str, Tensor], engine: Any) -> dict[str, Any]:
    """Return {name: `QuantState`} for each of the ``views`` into ``engine`` that is a weight in 4 bit."""
    constants = {
        parameter.data_ptr() + int(parameter.bnb_shard_offsets[number]): state
        for parameter in engine.parameters()
        for number, state in getattr(parameter, "bnb_quant_state", {}).items()
    }
    return {name: constants[view.data_ptr()] for name, view in views.items() if view.dtype == torch.uint8}
