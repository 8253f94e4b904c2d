"""A CUDA device that is none: tensors say `cuda:0` and are computed on the CPU.

`torch.cuda` reports one device. Tensors can also be put on `cuda:1`, for a model with layers on two GPUs.

What breaks on a GPU and not on a CPU is found without one: a tensor on the wrong device raises as it does on CUDA, and
each wait of the CPU for the device is counted with the line of Python that made it.

The tests of `TESTS` run in a process of their own, which `test_pretended.py` starts. To run one by itself, set the
variable: ``GRPO_MATH_PRETENDED_GPU=1 python -m pytest tests/gpu_like``. A test counts what it does::

    from gpu_like.counting import counting

    def test_an_update_waits_but_once(...):
        model.to("cuda")                            # or a trainer, which does that itself: leave use_cpu out
        with counting() as counts:
            trainer.train()
        assert counts.total() == 1, counts

For a script: ``python -c "from gpu_like import device; device.load(); import torch; ..."``, `load` before torch.

How: `guard.cpp`, loaded before torch, registers a device where the CPU build of torch has none. `Cuda` is a tensor that
holds a CPU tensor; every operator on it, backward and recomputation included, is computed there.
`stand_ins.py` answers for `torch.cuda`. Random numbers are the CPU's, in the same order, so that a run samples the
same completions as on the CPU.

`simulation/` runs a recipe at full size on the same device: large tensors have no memory then, and it is counted.

Does not pretend time, kernels of Triton (TRL's paths around them are taken, their CPU form computes), NCCL, or
rounding: CUDA's kernels add up in other orders.
"""

import ctypes
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VARIABLE = "GRPO_MATH_PRETENDED_GPU"
TESTS = ["test_ceilings.py", "test_device.py", "test_selftest.py", "test_training.py"]
# They look for a GPU's libraries when they are imported, if torch says that there is one.
BEFORE = ("deepspeed", "bitsandbytes")


def _torch() -> Path:
    """Return the folder of torch, without importing torch."""
    spec: Any = importlib.util.find_spec("torch")
    return Path(spec.origin).parent


def hindrance() -> str | None:
    """Why there can be no pretended device, or None."""
    libraries = {path.name for path in (_torch() / "lib").glob("libtorch_*.so")}
    for_cpus = "libtorch_cpu.so" in libraries and not libraries & {"libtorch_cuda.so", "libtorch_hip.so"}
    if for_cpus and shutil.which("g++"):
        return None
    return "it needs g++, and torch for Linux that is built for CPUs alone"


def load() -> None:
    """Make the device, for as long as this process lives. Call it before anything imports torch.

    Builds guard.cpp against the installed torch, in two seconds.
    """
    if "torch" in sys.modules:
        raise RuntimeError("no pretended GPU: torch is imported already, and has looked for devices")
    folder = _torch()
    flags = ["-O1", "-std=c++20", "-shared", "-fPIC", f"-I{folder / 'include'}"]
    linked = [f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{folder / 'lib'}"]
    ctypes.CDLL(str(folder / "lib/libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    with tempfile.TemporaryDirectory(prefix="gpu_like-") as built_in:
        built = f"{built_in}/guard.so"
        subprocess.run(["g++", *flags, str(Path(__file__).with_name("guard.cpp")), "-o", built, *linked], check=True)
        ctypes.CDLL(built)
    from gpu_like import tensors

    tensors.take_over()
    for name in BEFORE:
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    from gpu_like import stand_ins

    stand_ins.put_in()
