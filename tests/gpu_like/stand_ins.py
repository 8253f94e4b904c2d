"""What `torch.cuda`, and TRL of its Triton kernels, answer while the device is pretended.

Does not answer truly: memory is always free, a stream always done, and a generator's state empty.
"""

from __future__ import annotations

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
    """A stream, or an event, that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        return None

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or Stream()

    def nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = nothing

    def elapsed_time(self, other: Any) -> float:
        return 0.0


ANSWERS: dict[Any, str] = {
    True: "is_available is_initialized is_bf16_supported",
    None: "_lazy_init set_device manual_seed manual_seed_all set_rng_state set_rng_state_all empty_cache synchronize "
    "reset_peak_memory_stats ipc_collect",
    0: "current_device _exchange_device _maybe_exchange_device memory_allocated memory_reserved max_memory_allocated "
    "max_memory_reserved",
    (9, 0): "get_device_capability",
    NAME: "get_device_name",
    (MEMORY, MEMORY): "mem_get_info",
}


def put_in() -> None:
    """For good, and before anything asks."""
    properties = SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=MEMORY, multi_processor_count=132, uuid="0", gcnArchName=""
    )
    state = torch.zeros(16, dtype=torch.uint8)
    answers = {name: _always(a) for a, names in ANSWERS.items() for name in names.split()}
    answers |= {
        "device_count": _always(1),
        "get_device_properties": _always(properties),
        "get_rng_state": lambda *args: state.clone(),
        "get_rng_state_all": lambda: [state.clone()],
        "memory_stats": lambda *args: {},
        "Stream": Stream,
        "Event": Stream,
        "current_stream": lambda *args: Stream(),
        "default_stream": lambda *args: Stream(),
        "stream": lambda stream: Stream(),
    }
    for name, answer in answers.items():
        for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
            if hasattr(module, name):
                setattr(module, name, answer)
    torch.load = partial(_load, torch.load)
    # TRL takes the way that it takes around Triton's kernels; what they compute is computed in plain torch.
    trl.trainer.utils._use_triton = lambda device: device.type == "cuda"
    # Whether two weights share memory, which whoever writes a checkpoint asks.
    for name in ("storage_ptr", "storage_size"):
        plain = getattr(safetensors.torch, name)
        for module in (safetensors.torch, transformers.pytorch_utils, peft.utils.other):
            setattr(module, name, partial(_of_inner, plain))
    torch.cuda._initialized = True
    torch.backends.cuda.is_built = _always(True)


def _load(plain: Any, *args: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """`torch.load`, which would bring storages over, not tensors."""
    there = isinstance(map_location, str | torch.device) and torch.device(map_location).type == "cuda"
    loaded = plain(*args, map_location="cpu" if there else map_location, **kwargs)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to("cuda"), loaded) if there else loaded


def _of_inner(function: Any, tensor: torch.Tensor) -> Any:
    return function(within(tensor))


def _always(value: Any) -> Any:
    """A function of its own for each: torch's compiler refuses one that stands twice in its table of functions."""
    return lambda *args, **kwargs: value
