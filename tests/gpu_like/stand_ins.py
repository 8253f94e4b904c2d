"""What `torch.cuda`, and TRL of its Triton kernels, answer while the device is pretended.

Does not answer truly: memory is always free, a stream is always done, and a generator's state is empty.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import peft.utils.other
import safetensors.torch
import torch
import transformers.pytorch_utils
import trl.trainer.utils
from gpu_like.tensors import within
from torch.utils._pytree import tree_map_only

NAME, MEMORY = "pretended GPU", 140 * 2**30


class Stream:
    """A stream or an event. Nothing runs: it is always done, and its methods do nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return always(name == "query")


def always(value: Any) -> Any:
    """Return a new function each time: torch's compiler refuses a function that is twice in its table."""
    return lambda *args, **kwargs: value


STATE = torch.zeros(16, dtype=torch.uint8)
PROPERTIES = {"name": NAME, "major": 9, "minor": 0, "total_memory": MEMORY, "multi_processor_count": 2, "uuid": "0"}
ANSWERS: dict[str, Any] = {
    **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported", "_is_compiled"), True),
    **dict.fromkeys(("_lazy_init", "init", "set_device", "manual_seed", "manual_seed_all", "set_rng_state"), None),
    **dict.fromkeys(("set_rng_state_all", "empty_cache", "synchronize", "ipc_collect"), None),
    **dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device", "memory_allocated"), 0),
    **dict.fromkeys(("max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
    **dict.fromkeys(("current_stream", "default_stream"), Stream()),
    "reset_peak_memory_stats": None,
    "get_device_capability": (9, 0),
    "get_device_name": NAME,
    "device_count": 1,
    "mem_get_info": (MEMORY, MEMORY),
    "get_device_properties": SimpleNamespace(**PROPERTIES, gcnArchName=""),
    "get_rng_state": STATE,
    "get_rng_state_all": [STATE],
    "memory_stats": {},
}


def put_in() -> None:
    """For good, and before anything asks."""
    functions = {name: always(answer) for name, answer in ANSWERS.items()}
    functions |= {"Stream": Stream, "Event": Stream, "stream": lambda stream: stream or Stream()}
    for name, function in functions.items():
        for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
            if hasattr(module, name):
                setattr(module, name, function)
    torch.cuda._initialized = True
    torch.accelerator.synchronize = always(None)
    torch.backends.cuda.is_built = always(True)
    torch.backends.cuda.can_use_flash_attention = _flash_takes
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is made on the CPU and copied
    torch.load = partial(_load, torch.load)
    # TRL takes the way that it takes around Triton's kernels; what they compute is computed in plain torch.
    trl.trainer.utils._use_triton = lambda device: device.type == "cuda"
    # Whether two weights share memory, which whoever writes a checkpoint asks.
    for name in ("storage_ptr", "storage_size"):
        plain = getattr(safetensors.torch, name)
        for module in (safetensors.torch, transformers.pytorch_utils, peft.utils.other):
            setattr(module, name, partial(_of_inner, plain))


def _flash_takes(params: Any, debug: bool = False) -> bool:
    return params.query.dtype != torch.float32 and params.query.size(-1) <= 256


def _load(plain: Any, *args: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """`torch.load`, which would bring storages over, not tensors."""
    existing = isinstance(map_location, str | torch.device) and torch.device(map_location).type == "cuda"
    loaded = plain(*args, map_location="cpu" if existing else map_location, **kwargs)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda"), loaded) if existing else loaded


def _of_inner(function: Any, tensor: torch.Tensor) -> Any:
    return function(within(tensor))
