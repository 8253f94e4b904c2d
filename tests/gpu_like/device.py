"""A CUDA device that is none: tensors say `cuda:0` and are computed on the CPU.

`torch.cuda` reports one device. Tensors can also be put on `cuda:1`, for a model with layers on two GPUs.

What breaks on a GPU and not on a CPU is found without one: a tensor on the wrong device raises as it does on CUDA, and
each wait of the CPU for the device, and each kernel launch, is counted with the line of Python that made it.

For a test: mark it, and it runs in a process of its own in which the device is there (`gpu_like/plugin.py`). Its
fixtures are made there too, and its file may import torch at the top::

    from gpu_like.counting import counting

    @pytest.mark.pretended_gpu
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

Does not pretend memory (everything fits), time, kernels of Triton (TRL's paths around them are taken, their CPU form
computes), NCCL, or rounding: CUDA's kernels add up in other orders.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
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


@cache
def library() -> Path:
    """guard.cpp, built against the installed torch: two seconds. Raises where `hindrance` has a reason."""
    if reason := hindrance():
        raise RuntimeError(f"no pretended GPU: {reason}")
    torch = _torch()
    folder = tempfile.mkdtemp(prefix="gpu_like-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    built = Path(folder) / "guard.so"
    flags = ["-O1", "-std=c++20", "-shared", "-fPIC", f"-I{torch / 'include'}"]
    linked = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
    done = subprocess.run(
        ["g++", *flags, str(HERE / "guard.cpp"), "-o", str(built), *linked], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"no pretended GPU: g++ failed on guard.cpp\n{done.stderr[-2000:]}")
    return built


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def load(built: Path | None = None) -> None:
    """Make the device, for as long as this process lives. Before anything imports torch."""
    if "torch" in sys.modules:
        raise RuntimeError("no pretended GPU: torch is imported already, and has looked for devices")
    ctypes.CDLL(str(_torch() / "lib/libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(built or library()))
    from gpu_like import tensors

    tensors.take_over()
    for name in BEFORE:
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    from gpu_like import stand_ins

    stand_ins.put_in()
