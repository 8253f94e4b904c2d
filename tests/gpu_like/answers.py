"""What `torch.cuda` answers about a device that is pretended, and its streams.

Does not answer truly: a stream is always done, and a generator's state is empty.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

NAME, MEMORY = "pretended GPU", 140 * 2**30


class Stream:
    """A stream or an event. Nothing runs: it has a number, and 0 is the default."""

    current, made = 0, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number = Stream.made
        Stream.made += 1
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> Stream:
        self.before, Stream.current = Stream.current, self.number
        return self

    def __exit__(self, *error: Any) -> None:
        Stream.current = self.before

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        return event or self

    def nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = nothing


ANSWERS: dict[Any, str] = {
    True: "is_available is_initialized is_bf16_supported _is_compiled",
    None: "_lazy_init init set_device manual_seed manual_seed_all set_rng_state set_rng_state_all empty_cache "
    "synchronize ipc_collect reset_peak_memory_stats",
    0: "current_device _exchange_device _maybe_exchange_device memory_allocated max_memory_allocated memory_reserved "
    "max_memory_reserved",
    (9, 0): "get_device_capability",
    NAME: "get_device_name",
}


def put_in(size: int = MEMORY) -> None:
    """Replace the functions of `torch.cuda` for the rest of the process. The device has ``size`` bytes."""
    properties = SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=size, multi_processor_count=132, uuid="0", gcnArchName=""
    )
    state, default = torch.zeros(16, dtype=torch.uint8), Stream()
    answers = {name: always(answer) for answer, names in ANSWERS.items() for name in names.split()}
    answers |= {
        "device_count": always(1),  # 1 is True as a key of ANSWERS
        "mem_get_info": always((size, size)),
        "get_device_properties": always(properties),
        "get_rng_state": lambda *args: state.clone(),
        "get_rng_state_all": lambda: [state.clone()],
        "memory_stats": always({}),
        "Stream": Stream,
        "Event": Stream,
        "current_stream": always(default),
        "default_stream": always(default),
        "stream": lambda stream: stream or default,
    }
    for name, answer in answers.items():
        for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
            if hasattr(module, name):
                setattr(module, name, answer)
    torch.cuda._initialized = True
    torch.backends.cuda.is_built = always(True)
    torch.backends.cuda.can_use_flash_attention = flash_takes
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is made on the CPU and copied


def flash_takes(params: Any, debug: bool = False) -> bool:
    return params.query.dtype != torch.float32 and params.query.size(-1) <= 256


def always(value: Any) -> Any:
    """Return a new function each time: torch's compiler refuses a function that is twice in its table."""
    return lambda *args, **kwargs: value
