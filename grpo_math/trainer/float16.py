"""Training in float16 on GPUs without bfloat16: float32 for an adapter's trained weights, and the loss scale.

The loss is multiplied by a scale, so that small gradients do not become zero. If a gradient then overflows, the step is
skipped and the scale is halved; after 2000 steps without an overflow it is doubled. accelerate and torch do that, and
transformers saves the scale in a checkpoint. DeepSpeed scales the loss itself, and keeps a float32 copy of the weights.
"""

from typing import Any

import torch
from accelerate.utils import DistributedType, is_peft_model

from grpo_math.errors import ConfigError
from grpo_math.generation.dtypes import dtype_error
from grpo_math.settings.run_settings import RunSettings


def make_adapter_float32(model: Any, accelerator: Any) -> None:
    """Turn the trained weights of an adapter into float32, if this run computes in float16.

    TRL rounds the adapter of a quantised base to bfloat16, and a script may load an adapter in 16 bit. Raises
    `ConfigError` for a family that overflows in float16, and for trained 16-bit weights without an adapter.
    """
    if accelerator.mixed_precision != "fp16":
        return
    settings = RunSettings({"dtype": str(model.dtype).removeprefix("torch."), "bf16": False, "fp16": True})
    if error := dtype_error(settings, None, model.config.model_type):
        raise error
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            if not is_peft_model(model):
                raise ConfigError(
                    "fp16",
                    True,
                    f"cannot scale the gradients of {settings.dtype} weights",
                    "load the model in float32, or train an adapter",
                )
            parameter.data = parameter.data.float()


def loss_scale(accelerator: Any, engine: Any) -> float | None:
    """Return the factor of the loss in torch's scaler or in DeepSpeed's ``engine``, or None.

    >>> from types import SimpleNamespace
    >>> engine = SimpleNamespace(fp16_enabled=lambda: True, optimizer=SimpleNamespace(loss_scale=1024.0))
    >>> loss_scale(SimpleNamespace(scaler=None), engine)
    1024.0
    """
    if accelerator.scaler is not None:
        return float(accelerator.scaler.get_scale())
    return engine.optimizer.loss_scale if engine is not None and engine.fp16_enabled() else None
