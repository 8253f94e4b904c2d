"""The machine of a run: main memory, CPUs, GPUs, and the versions of the packages.

Does not import torch until the GPUs are asked for.
"""

import os
import sys
from importlib import metadata
from typing import Any

GB = 2**30


def main_memory() -> float:
    """GB of main memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB


PACKAGES = ("grpo_math", "torch", "trl", "transformers", "accelerate", "peft", "deepspeed", "vllm", "math-verify")


def versions() -> dict[str, str]:
    """The installed version of each of `PACKAGES`, and Python's."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Of the main process's machine: CPUs, GB of main memory, and the GPUs that it sees: name, number, GB of one."""
    found: dict[str, Any] = {"cpus": os.cpu_count(), "memory_gb": round(main_memory(), 1)}
    import torch

    if torch.cuda.is_available():
        of_gpu = torch.cuda.get_device_properties(0)
        memory = round(of_gpu.total_memory / GB, 1)
        found |= {"gpu": of_gpu.name, "gpus": torch.cuda.device_count(), "gpu_memory_gb": memory}
    return found
