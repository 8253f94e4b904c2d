"""The machine of a run: main memory, CPUs, GPUs, network ports, and the versions of the packages.

Imports torch only to list GPUs. A free port may be taken by another program before use.
"""

import os
import socket
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from grpo_math import __version__

GB = 2**30
# OpenMP's threads spin while they wait, which takes the time of other programs. A step of the demo takes 4.0 s instead
# of 3.1 s if they sleep, and next to one busy process 4.5 s instead of 7.3 s. On GPUs it makes no difference.
# The variable has to be set before torch is imported.
SLEEPING_THREADS = ("OMP_WAIT_POLICY", "PASSIVE")


def size(number: float) -> str:
    """Return a number of bytes in words.

    >>> size(3 * GB), size(GB / 1024)
    ('3.00 GB', '1.0 MB')
    """
    return f"{number / GB:.2f} GB" if number >= 0.01 * GB else f"{number / 2**20:.1f} MB"


def main_memory(sysfs: Path = Path("/sys")) -> float:
    """Return the GB of main memory that this process may use: the machine's, within its container's limit.

    ``sysfs`` has the files of Linux.
    """
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # of cgroups 2 and 1
        with suppress(OSError, ValueError):  # the text is "max" without a limit
            available = min(available, int((sysfs / "fs/cgroup" / limit).read_text()))
    return available / GB


PACKAGES = (
    *("torch", "trl", "transformers", "accelerate", "peft", "deepspeed", "vllm", "math-verify", "bitsandbytes"),
    *("vllm-bnb-plugin", "liger_kernel", "datasets", "huggingface_hub"),
)


@cache
def versions() -> dict[str, str]:
    """Return the installed version of each of `PACKAGES`, of Python, and of this package."""
    # A checkout may have no metadata, or that of an older version.
    installed = {"python": ".".join(map(str, sys.version_info[:3])), "grpo_math": __version__}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


@cache
def supported() -> dict[str, Requirement]:
    """Return the supported range of each package; {} for a checkout that is not installed."""
    try:
        lines = metadata.requires("grpo_math") or []
    except metadata.PackageNotFoundError:
        lines = []
    return {required.name: required for required in map(Requirement, lines) if required.specifier}


def launched_with(kind: str) -> bool:
    """Return True if accelerate launched this process with ``kind``, which is DEEPSPEED or FSDP."""
    return os.environ.get(f"ACCELERATE_USE_{kind}", "").lower() == "true"


def physical_cores(sysfs: Path = Path("/sys")) -> int:
    """Return the cores that this process may use: its CPUs, two threads of a core as one, within its container's share.

    ``sysfs`` has the files of Linux. On another system every CPU counts.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = set()
    for cpu in cpus:
        siblings = sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    share = float(len(cores))
    # docker run --cpus 2, or a pod's limit. The text is "max 100000" without a limit.
    with suppress(OSError, ValueError):
        quota, period = map(int, (sysfs / "fs/cgroup/cpu.max").read_text().split())
        share = min(share, quota / period)
    return max(1, round(share))


def use_physical_cores() -> None:
    """Set torch's threads for training on a CPU, unless OMP_NUM_THREADS is set.

    torch takes one thread for each CPU that the system shows. Two on one core wait for each other, and in a container
    they may be many more than its share.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, physical_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def hardware() -> dict[str, Any]:
    """Return the CPUs and GB of main memory of this machine, and its GPUs, or the threads of torch without a GPU."""
    machine: dict[str, Any] = {"cpus": os.cpu_count(), "memory_gb": round(main_memory(), 1)}
    import torch

    if torch.cuda.is_available():
        first = torch.cuda.get_device_properties(0)
        machine |= {
            "gpu": first.name,
            "gpus": torch.cuda.device_count(),
            "gpu_memory_gb": round(first.total_memory / GB, 1),
        }
    else:
        machine["threads"] = torch.get_num_threads()
    return machine


def port_is_free(port: int) -> bool:
    """Return True if nobody listens at this port of the machine.

    >>> with socket.create_server(("", 0)) as listening:
    ...     port_is_free(free_port()), port_is_free(listening.getsockname()[1])
    (True, False)
    """
    with suppress(OSError), socket.create_server(("", port)):
        return True
    return False


def free_port() -> int:
    """Return a port that nobody uses at this moment."""
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]
