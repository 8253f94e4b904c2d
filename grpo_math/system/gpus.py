"""The GPUs of this machine, as nvidia-smi lists them.

Does not import torch, which would take memory of each GPU.
"""

import os
import subprocess
from functools import cache
from typing import NamedTuple

from grpo_math.errors import ConfigError

DESKTOP = 4096  # MB: the most memory that a desktop is assumed to take


class Gpu(NamedTuple):
    """A GPU as nvidia-smi lists it: its number, GB of memory, and the other processes that use it ("" if unused).

    The memory that a desktop takes is left out of ``gb``. ``capability``: the compute capability, None if unknown.
    """

    number: int
    gb: float
    used_by: str
    capability: float | None = None


def count_and_gb() -> tuple[int, float]:
    """Return (GPUs that this process may use, GB of the smallest), or (0, 0.0) without a GPU."""
    gpus = visible_gpus()
    return len(gpus), min((gpu.gb for gpu in gpus), default=0.0)


def first_gpus(count: int | None) -> list[Gpu]:
    """Return the first ``count`` GPUs that this process may use, or all. Raises `ConfigError` if there are fewer."""
    gpus = visible_gpus()
    if count is not None and not 0 < count <= len(gpus):
        reason = f"cannot be had: {len(gpus)} GPU{' is' if len(gpus) == 1 else 's are'} visible here"
        raise ConfigError("gpus", count, reason, f"give 1 to {len(gpus)}" if gpus else "leave it out")
    return gpus[:count]


def visible_gpus() -> list[Gpu]:
    """Return the GPUs of this machine in CUDA_VISIBLE_DEVICES, in its order; none if nvidia-smi fails.

    As in CUDA, an unknown name and all names after it are ignored. A GPU counts as used if nvidia-smi lists another
    process on it. A container may hide the processes, so it also counts as used if more memory is taken than a desktop
    takes.
    """
    gpus = {}
    try:
        processes = ask_nvidia_smi("compute-apps=gpu_uuid,pid")
        columns = "gpu=index,uuid,memory.total,memory.used,compute_cap"
        for index, uuid, total, used, capability in ask_nvidia_smi(columns):
            pids = ", ".join(pid for gpu, pid in processes if gpu == uuid and pid != str(os.getpid()))
            used_mb = int(used) if used.isdigit() else 0
            taken = used_mb if used_mb > int(total) / 10 else 0
            hidden = f"a hidden process with {taken / 1024:.1f} GB" if taken > max(DESKTOP, int(total) / 4) else ""
            by = f"process {pids}" if pids else hidden
            gb = (int(total) - (0 if by else taken)) / 1024
            known = float(capability) if capability[:1].isdigit() else None
            gpus[uuid] = Gpu(int(index), gb, by, known)
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    if (selection := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return list(gpus.values())
    chosen: list[Gpu] = []
    for name in map(str.strip, selection.split(",")):
        matches = [gpu for uuid, gpu in gpus.items() if name == str(gpu.number) or (name and uuid.startswith(name))]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen += matches
    return chosen


@cache
def capabilities() -> tuple[float, ...]:
    """Return the known compute capabilities of the GPUs that this process may use."""
    return tuple(gpu.capability for gpu in visible_gpus() if gpu.capability is not None)


def ask_nvidia_smi(query: str) -> list[list[str]]:
    """Return nvidia-smi's rows with two or more columns. Raises OSError or SubprocessError if it fails."""
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return [[word.strip() for word in line.split(",")] for line in output.splitlines() if "," in line]
