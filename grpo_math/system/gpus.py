"""The GPUs of this machine, as nvidia-smi lists them.

Does not import torch, which would take memory of each GPU. torch_build.py compares the GPUs with the installed torch.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import PurePath
from typing import NamedTuple

from grpo_math.errors import ConfigError, Finding
from grpo_math.system import torch_build
from grpo_math.system.machine import main_memory
from grpo_math.system.streams import say

DESKTOP = 4096, 6144  # MB: a desktop is assumed to take at most a quarter of the GPU, within these bounds
WSL = "/usr/lib/wsl/lib"  # the folder of nvidia-smi under WSL2, which may not be in PATH
SECONDS = 60  # without persistence mode, the driver starts for each call, for seconds per GPU
COLUMNS = ("index", "uuid", "memory.total", "memory.used", "compute_cap", "driver_version", "mig.mode.current", "name")
MIG = "MIG-"  # a slice of a GPU has a UUID that begins so
# The usable part of the memory in the name of a slice: 4.75 GB of "1g.5gb" on an A100, 16 GB of "1g.18gb" on an H200.
SLICE_SHARE = 0.9


class Gpu(NamedTuple):
    """A GPU, or a MIG slice of one.

    ``number``: as nvidia-smi counts; of the whole GPU for a slice. ``gb``: the memory, without what a desktop takes.
    ``used_by``: the processes that take more than a desktop; ``shared_with``: the other ones. Both are "" without any.
    ``capability``: the compute capability, None if unknown.
    """

    number: int
    gb: float
    used_by: str
    capability: float | None = None
    uuid: str = ""
    shared_with: str = ""
    driver: str = ""
    name: str = ""

    @property
    def device(self) -> str:
        """Return the GPU's name in CUDA_VISIBLE_DEVICES. CUDA finds a slice only by its UUID."""
        return self.uuid if self.uuid.startswith(MIG) else str(self.number)


def count_and_gb() -> tuple[int, float]:
    """Return (GPUs that this process may use, GB of the smallest), or (0, 0.0) without a GPU."""
    gpus = visible_gpus()
    return len(gpus), min((gpu.gb for gpu in gpus), default=0.0)


def capabilities() -> tuple[float, ...]:
    """Return the known compute capabilities of the GPUs that this process may use."""
    return tuple(gpu.capability for gpu in visible_gpus() if gpu.capability is not None)


def first_gpus(count: int | None) -> list[Gpu]:
    """Return the first ``count`` GPUs that this process may use, or all. Raises `ConfigError` if there are fewer."""
    gpus = visible_gpus()
    if count is not None and not 0 < count <= len(gpus):
        reason = f"cannot be had: {len(gpus)} GPU{' is' if len(gpus) == 1 else 's are'} visible here"
        raise ConfigError(
            "gpus", count, reason + listing_problems(), f"give 1 to {len(gpus)}" if gpus else "leave it out"
        )
    return gpus[:count]


def use_first_gpu() -> None:
    """Hide all GPUs but the first from this process. Call this before torch is imported.

    TRL would spread the model of a single process over all of them (``device_map="auto"``).
    """
    if len(selected_gpus()) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus()[0].uuid


def use_one_gpu() -> None:
    """Hide all GPUs but the first from a command that computes in this process, and warn if torch cannot use it."""
    use_first_gpu()
    for finding in warnings():
        say("warning:", f"{finding.message}: {finding.remedy}")
    if reason_and_remedy := unusable():
        reason, remedy = reason_and_remedy
        say("warning:", f"{reason}, so this runs on the CPU: {remedy}")


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that this process may use. Those for which torch has no kernels are left out next to others."""
    gpus = selected_gpus()
    return [gpu for gpu in gpus if torch_build.has_kernels(gpu.capability)] or gpus


def unusable() -> tuple[str, str] | None:
    """Return why the installed torch cannot use the GPUs of this process, and what to do; None if it can use them."""
    gpus = visible_gpus()
    return torch_build.hindrance(gpus[0].driver, gpus[0].capability) if gpus else None


def warnings() -> Iterator[Finding]:
    """Yield a warning about each GPU that cannot be used, and one with the words of a nvidia-smi that fails."""
    for line in _listed():
        if isinstance(line, str):
            yield Finding("warning", line, "if a GPU is here, restart the machine or the container")
    used = visible_gpus()
    if unused := [f"GPU {gpu.number} ({gpu.name}, {gpu.capability})" for gpu in selected_gpus() if gpu not in used]:
        message = f"{torch_build.installed()} has no kernels for {', '.join(unused)}: only the other GPUs are used"
        yield Finding("warning", message, f"export CUDA_VISIBLE_DEVICES={','.join(gpu.uuid for gpu in used)}")


def listing_problems() -> str:
    """Return the messages of `warnings` in brackets, for the end of a sentence."""
    return "".join(f" ({finding.message})" for finding in warnings())


def selected_gpus() -> list[Gpu]:
    """Return the GPUs of this machine in CUDA_VISIBLE_DEVICES, in its order; none if nvidia-smi fails.

    As in CUDA, an unknown name and all names after it are ignored, and a process has at most one MIG slice.
    """
    gpus = [one for one in _listed() if isinstance(one, Gpu)]
    if (selection := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return [gpu for gpu in gpus if not gpu.uuid.startswith(MIG)] or gpus[:1]
    chosen: list[Gpu] = []
    for name in map(str.strip, selection.split(",")):
        matches = [gpu for gpu in gpus if name == str(gpu.number) or (name and gpu.uuid.startswith(name))]
        # A whole GPU that is split is its first slice.
        if len({gpu.number for gpu in matches}) != 1 or matches[0] in chosen:
            break
        chosen.append(matches[0])
    return chosen[:1] if any(gpu.uuid.startswith(MIG) for gpu in chosen) else chosen


def _listed() -> Iterator[Gpu | str]:
    """Yield each GPU and each slice, and a line for what cannot be used.

    A GPU counts as used if more memory is taken than a desktop takes. A container hides the processes.
    """
    rows, failure = _ask("gpu", COLUMNS)
    if failure:
        yield failure
    processes = _ask("compute-apps", ("gpu_uuid", "pid", "process_name"))[0] if rows else []
    for index, uuid, total, used, capability, driver, mig, name in rows:
        known = float(capability) if capability[:1].isdigit() else None
        card = partial(Gpu, int(index), capability=known, driver=driver, name=name)
        if mig == "Enabled":
            slices = _slices(index)
            yield from (card(gb, "", uuid=slice_uuid) for slice_uuid, gb in slices)
            if not slices:
                yield f"GPU {index} is in MIG mode, and nvidia-smi -L lists no slice of it"
        elif total.isdigit():
            taken = int(used) if used.isdigit() else 0
            others = ", ".join(f"process {pid} ({PurePath(path).name})" for gpu, pid, path in processes if gpu == uuid)
            if taken > min(max(int(total) / 4, DESKTOP[0]), DESKTOP[1]):
                used_by = f"{others or 'a hidden process'} with {taken / 1024:.1f} GB"
                yield card(int(total) / 1024, used_by, uuid=uuid)
            else:
                yield card((int(total) - taken) / 1024, "", uuid=uuid, shared_with=others)
        # Unified memory, as of a GB10: the GPU uses main memory, and nvidia-smi states none.
        elif total in ("[N/A]", "[Not Supported]"):
            yield card(main_memory(), "", uuid=uuid)
        else:
            yield f"GPU {index} has no memory that nvidia-smi can read: {total}"


def _slices(index: str) -> list[tuple[str, float]]:
    """Return the UUID and the GB of each MIG slice of a GPU."""
    words, number, slices = _run("-L")[0], "", []
    for line in words.splitlines():
        if gpu := re.match(r"GPU (\d+):", line):
            number = gpu[1]
        elif (found := re.search(r"\.(\d+)gb.*UUID: (MIG-[^)]+)", line)) and number == index:
            slices.append((found[2], SLICE_SHARE * int(found[1])))
    return slices


def _ask(what: str, columns: Sequence[str]) -> tuple[list[list[str]], str]:
    """Return the rows of a query, and why nvidia-smi has failed."""
    output, failure = _run(f"--query-{what}={','.join(columns)}", "--format=csv,noheader,nounits")
    # The last column is a name, which may contain a comma.
    rows = [[word.strip() for word in line.split(",", len(columns) - 1)] for line in output.splitlines()]
    return [row for row in rows if len(row) == len(columns)], failure


def _run(*words: str) -> tuple[str, str]:
    """Return the output of nvidia-smi, and why it has failed; both are empty without a nvidia-smi."""
    program = shutil.which("nvidia-smi", path=os.pathsep.join((os.environ.get("PATH", os.defpath), WSL)))
    return run_once(program, *words) if program else ("", "")


@cache
def run_once(program: str, *words: str) -> tuple[str, str]:
    """Return the output of a program, and why it has failed. A process starts it once with the same words."""
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "", f"nvidia-smi has not answered in {SECONDS} s"
    except OSError as error:
        return "", f"nvidia-smi cannot be started: {error.strerror}"
    if done.returncode == 0:
        return done.stdout, ""
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    return "", f"nvidia-smi: {(lines or [f'exit code {done.returncode}'])[0]}"
