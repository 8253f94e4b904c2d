"""A model from its config.json alone, on the pretended GPU: the parameters and buffers of transformers' own class.

In 4 bit its linear maps are bitsandbytes' own, with storages of the size that its kernels make.
"""

from typing import Any

import torch
import transformers
from transformers.initialization import no_init_weights
from transformers.quantizers import AutoHfQuantizer


def without_weights() -> None:
    """From now on ``from_pretrained`` makes the model on the pretended GPU and reads no weights."""
    base: Any = transformers.PreTrainedModel
    base.from_pretrained = classmethod(_made)


def _made(cls: Any, path: str, *args: Any, **given: Any) -> Any:
    config = given.pop("config", None) or transformers.AutoConfig.from_pretrained(path)
    quantization = given.pop("quantization_config", None)
    dtype = given.pop("dtype", None)
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    kernel = {name: value for name, value in given.items() if name == "attn_implementation" and value}
    with torch.device("cuda"), no_init_weights():
        model = cls._from_config(config, dtype=dtype or torch.bfloat16, **kernel)
    model.tie_weights()
    model.eval()
    if quantization is not None:
        _quantize(model, quantization)
    model.config._name_or_path = str(path)
    return model


def _quantize(model: Any, config: Any) -> None:
    """Every linear map but the head in bitsandbytes' 4 bit, as transformers does it. Its parameter is a plain tensor
    with the attributes that bitsandbytes and peft read of theirs, since theirs cannot hold one without memory."""
    import bitsandbytes
    from bitsandbytes.functional import quantize_4bit

    head = model.get_output_embeddings()
    how = {
        "compress_statistics": config.bnb_4bit_use_double_quant,
        "quant_type": config.bnb_4bit_quant_type,
        "quant_storage": config.bnb_4bit_quant_storage,
    }
    for parent in list(model.modules()):
        for name, old in list(parent.named_children()):
            if type(old) is not torch.nn.Linear or old is head:
                continue
            sizes = old.in_features, old.out_features, old.bias is not None
            with torch.device("meta"):
                new: Any = bitsandbytes.nn.Linear4bit(*sizes, config.bnb_4bit_compute_dtype, **how)
            data, state = quantize_4bit(old.weight.data, blocksize=64, **how)
            weight = torch.nn.Parameter(data, requires_grad=False)
            vars(weight).update(how, quant_state=state, bnb_quantized=True, blocksize=64, module=new)
            new.weight, new.bias, new.quant_state = weight, old.bias, state
            setattr(parent, name, new)
    model.is_quantized = model.is_loaded_in_4bit = True
    model.config.quantization_config = config
    model.hf_quantizer = AutoHfQuantizer.from_config(config)
    model.quantization_method = config.quant_method
