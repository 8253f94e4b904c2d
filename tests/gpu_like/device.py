"""A CUDA device that is none: tensors say `cuda:0` and are computed on the CPU.

`torch.cuda` reports one device. Tensors can also be put on `cuda:1`, for a model with layers on two GPUs.

What breaks on a GPU and not on a CPU is found without one: a tensor on the wrong device raises as it does on CUDA, and
each wait of the CPU for the device, and each kernel launch, is counted with the line of Python that made it.

The tests of `TESTS` run in a process of their own, which `test_pretended.py` starts. To run one by itself, set the
variable: ``GRPO_MATH_PRETENDED_GPU=1 python -m pytest tests/gpu_like``. A test counts what it does::

    from gpu_like.counting import counting

    def test_an_update_waits_but_once(...):
        model.to("cuda")                            # or a trainer, which does that itself: leave use_cpu out
        with counting() as counts:
            trainer.train()
        assert sum(counts.synchronisations.values()) == 1, counts

For a script: ``python -c "from gpu_like import device; device.load(); import torch; ..."``, `load` before torch.

How: `guard.cpp`, loaded before torch, registers a device where the CPU build of torch has none. `Cuda` is a tensor that
holds a CPU tensor; every operator on it, backward and recomputation included, is computed there.
`stand_ins.py` answers for `torch.cuda`. Random numbers are the CPU's, in the same order, so that a run samples the
same completions as on the CPU.

Memory is counted (`counting.memory`), and everything fits.

Does not pretend time, kernels of Triton (TRL's paths around them are taken, their CPU form computes), NCCL, or
rounding: CUDA's kernels add up in other orders.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
VARIABLE = "GRPO_MATH_PRETENDED_GPU"
TESTS = ["test_ceilings.py", "test_device.py", "test_memory.py", "test_training.py"]
# They look for a GPU's libraries when they are imported, if torch says that there is one.
BEFORE = ("deepspeed", "bitsandbytes")


def hindrance() -> str | None:
    """Why there can be no pretended device, or None."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    folder = Path(spec.origin).parent
    if not (folder / "lib/libtorch_cpu.so").exists() or not (folder / "include/ATen").is_dir():
        return "this torch has no shared library and headers for Linux"
    if (folder / "lib/libtorch_cuda.so").exists() or (folder / "lib/libtorch_hip.so").exists():
        return "this torch is built for real GPUs"
    if shutil.which("g++") is None:
        return "there is no g++"
    return None


def build(folder: Path) -> Path:
    """Build guard.cpp against the installed torch: two seconds."""
    torch, built = _torch(), folder / "guard.so"
    flags = ["-O1", "-std=c++20", "-shared", "-fPIC", f"-I{torch / 'include'}"]
    linked = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
    subprocess.run(["g++", *flags, str(HERE / "guard.cpp"), "-o", str(built), *linked], check=True)
    return built


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def register() -> None:
    """Register the device with torch's C++ side. Before anything imports torch."""
    if "torch" in sys.modules:
        raise RuntimeError("no pretended GPU: torch is imported already, and has looked for devices")
    if reason := hindrance():
        raise RuntimeError(f"no pretended GPU: {reason}")
    ctypes.CDLL(str(_torch() / "lib/libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    with tempfile.TemporaryDirectory(prefix="gpu_like-") as folder:
        ctypes.CDLL(str(build(Path(folder))))


def load() -> None:
    """Make the device, for as long as this process lives."""
    register()
    from gpu_like import tensors

    tensors.take_over()
    for name in BEFORE:
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    from gpu_like import stand_ins

    stand_ins.put_in()


def begin() -> None:
    """Make the device if the variable is set. `tests/conftest.py` calls this before anything imports torch."""
    if VARIABLE in os.environ:
        load()
