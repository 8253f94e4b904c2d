"""Read the requirements of the installed torch: the kind of GPU and the driver.

The build is read from torch/version.py, because importing torch takes seconds. If torch is imported already, torch
itself is asked.
"""

import ctypes
import re
import sys
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import NamedTuple

from grpo_math.errors import first_line


class Needs(NamedTuple):
    """The major version of the oldest driver, and the compute capabilities for which a build has kernels."""

    driver: int
    lowest: float
    above: float  # the first capability without kernels


# The CUDA of a build, or of an older one -> what it needs: NVIDIA's minor version compatibility, and PyTorch's support
# matrix of 2.11 to 2.14.
NEEDS = {13.0: Needs(580, 7.5, inf), 12.8: Needs(525, 7.5, inf), 12.0: Needs(525, 5.0, 10.0)}
PIP_CUDA = 13.0  # the CUDA of pip's torch
OLDER = "install torch 2.14 or older in PyTorch's build for CUDA 12.6"
NEWER = f"install PyTorch's build for CUDA {PIP_CUDA}"
UPDATE = "update the driver"
BY_DRIVER = {580: NEWER, 525: f"{UPDATE}, or {OLDER}", 0: UPDATE}  # the driver, or an older one -> what to do


class Build(NamedTuple):
    """The installed torch. ``cuda`` is 0 for a build without CUDA."""

    version: str
    cuda: float

    @property
    def needs(self) -> Needs:
        oldest = [*NEEDS.values()][-1]  # also of a CUDA that this package does not support
        return next((needs for cuda, needs in NEEDS.items() if (self.cuda or PIP_CUDA) >= cuda), oldest)

    def __str__(self) -> str:
        return f"torch {self.version} for CUDA {self.cuda}" if self.cuda else f"torch for CUDA {PIP_CUDA}"


@cache
def installed() -> Build:
    """Return the build of the installed torch."""
    spec = find_spec("torch")  # does not import torch
    if spec is None or spec.origin is None:
        return Build("", 0.0)
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    values = dict(re.findall(r"^(\w+)\b.*= '([\w.+-]+)'$", text, re.MULTILINE))
    cuda = re.match(r"\d+\.\d+", values.get("cuda", ""))
    return Build(values.get("__version__", ""), float(cuda[0]) if cuda else 0.0)


def has_kernels(capability: float | None) -> bool:
    """Return True if torch has kernels for a GPU of this compute capability, or if the capability is unknown."""
    if capability is None:
        return True
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda and (built := torch.cuda.get_arch_list()):
        return any(runs_on(architecture, capability) for architecture in built)
    return installed().needs.lowest <= capability < installed().needs.above


def lacks_kernels(capability: float | None) -> tuple[str, str] | None:
    """Return that torch has no kernels for a GPU of this compute capability, and what to do, or None."""
    if capability is None or has_kernels(capability):
        return None
    remedy = OLDER if capability < NEEDS[PIP_CUDA].lowest else NEWER
    return f"{installed()} has no kernels for compute capability {capability}", remedy


def runs_on(architecture: str, capability: float) -> bool:
    """Return True if kernels for an architecture run on a GPU of this compute capability.

    Machine code (``sm``) runs on newer cards of the same generation, and what the driver compiles (``compute``) on all
    newer cards.

    >>> [runs_on("sm_80", capability) for capability in (7.5, 8.0, 8.9, 9.0)]
    [False, True, True, False]
    >>> runs_on("compute_90", 12.0), runs_on("sm_120", 12.1), runs_on("sm_90a", 9.0)
    (True, True, True)
    """
    kind, major, minor = re.match(r"(\w+)_(\d+)(\d)", architecture).groups()  # type: ignore[union-attr]
    return float(f"{major}.{minor}") <= capability and (kind == "compute" or int(major) == int(capability))


def hindrance(driver: str, capability: float | None) -> tuple[str, str] | None:
    """Return why torch cannot use a GPU of this machine, and what to do, or None."""
    build, torch, lacking = installed(), sys.modules.get("torch"), lacks_kernels(capability)
    if torch is not None and torch.cuda.is_available():
        return lacking
    major = int(driver.partition(".")[0]) if driver[:1].isdigit() else inf
    remedy = next(remedy for oldest, remedy in BY_DRIVER.items() if major >= oldest)
    if not build.cuda:
        reason = f"torch {build.version} is built without CUDA, and there is a GPU with driver {driver}"
        # pip's torch would be no remedy.
        return (f"{reason}; {lacking[0]}", lacking[1]) if lacking else (reason, remedy)
    if lacking:
        return lacking
    # NVIDIA's cuda-compat brings a newer CUDA to an older driver.
    if major < build.needs.driver and driver_cuda() < int(build.cuda):
        return f"{build} needs driver {build.needs.driver} or newer, and this machine has {driver}", remedy
    try:
        if torch is not None:
            torch.cuda.init()
    except Exception as error:
        reason = f"{build} finds no GPU with driver {driver}: {first_line(error)}"
        return reason, "restart the machine or the container"
    return None


def driver_cuda() -> float:
    """Return the newest CUDA that libcuda supports, or 0 without libcuda."""
    with suppress(OSError, AttributeError):
        version = ctypes.c_int()
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        return version.value / 1000
    return 0.0
