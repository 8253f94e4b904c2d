"""What `torch.cuda`, and TRL of its Triton kernels, answer while the device is pretended.

Does not answer truly: memory is always free.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import peft.utils.other
import safetensors.torch
import torch
import transformers.pytorch_utils
import trl.trainer.utils
from gpu_like import answers
from gpu_like.tensors import within
from torch.utils._pytree import tree_map_only


def put_in() -> None:
    """For good, and before anything asks."""
    answers.put_in()
    torch.load = partial(_load, torch.load)
    # TRL takes the way that it takes around Triton's kernels; what they compute is computed in plain torch.
    trl.trainer.utils._use_triton = lambda device: device.type == "cuda"
    # Whether two weights share memory, which whoever writes a checkpoint asks.
    for name in ("storage_ptr", "storage_size"):
        plain = getattr(safetensors.torch, name)
        for module in (safetensors.torch, transformers.pytorch_utils, peft.utils.other):
            setattr(module, name, partial(_of_inner, plain))


def _load(plain: Any, *args: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """`torch.load`, which would bring storages over, not tensors."""
    existing = isinstance(map_location, str | torch.device) and torch.device(map_location).type == "cuda"
    loaded = plain(*args, map_location="cpu" if existing else map_location, **kwargs)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda"), loaded) if existing else loaded


def _of_inner(function: Any, tensor: torch.Tensor) -> Any:
    return function(within(tensor))
