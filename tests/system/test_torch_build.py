"""What the installed torch needs of a GPU and its driver."""

import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import launching
import pytest

from grpo_math.system import torch_build
from grpo_math.system.gpus import unusable
from grpo_math.system.torch_build import Build, has_kernels, hindrance, installed

PLAIN = Build("2.13.0", 13.0)


@pytest.fixture
def no_torch(monkeypatch):
    """No torch is imported, as in doctor."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def build(monkeypatch, one):
    monkeypatch.setattr(torch_build, "installed", lambda: one)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", PLAIN),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", Build("2.13.0+cpu", 0.0)),
        ("__version__ = '2.13.0a0+145a3a7bda.nv26.06'\ncuda = '13.2.1'\n", Build("2.13.0a0+145a3a7bda.nv26.06", 13.2)),
        (None, Build("", 0.0)),
    ],
)
def test_the_build_is_read_from_torch_without_importing_it(text, expected, tmp_path, monkeypatch, no_torch):
    (tmp_path / "version.py").write_text(text or "")
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py")) if text else None
    monkeypatch.setattr(torch_build, "find_spec", lambda name: spec)
    assert installed.__wrapped__() == expected
    assert "torch" not in sys.modules


@pytest.mark.parametrize(
    ("one", "driver", "capability", "reason", "remedy"),
    [
        (PLAIN, "580.65.06", 7.5, None, None),
        (PLAIN, "", None, None, None),
        (PLAIN, "595.10", 12.1, None, None),
        (PLAIN, "550.54.14", 8.6, "needs driver 580 or newer, and this machine has 550.54.14", "update the driver, or"),
        (Build("2.15.0", 13.2), "550.54", 8.6, "torch 2.15.0 for CUDA 13.2 needs driver 580 or newer", "2.14 or older"),
        (Build("2.13.0+cu126", 12.6), "550.54.14", 6.0, None, None),
        (Build("2.13.0+cu126", 12.6), "470.10", 8.6, "needs driver 525 or newer", "update the driver"),
        (Build("2.13.0+cu126", 12.6), "580.65.06", 12.0, "has no kernels for compute capability 12.0", "CUDA 13.0"),
        (Build("2.11.0+cu128", 12.8), "580.65.06", 12.0, None, None),
        (Build("2.5.0+cu118", 11.8), "580.65.06", 8.6, None, None),
        (PLAIN, "580.65.06", 7.0, "torch 2.13.0 for CUDA 13.0 has no kernels for compute capability 7.0", "CUDA 12.6"),
        (
            Build("2.13.0+cpu", 0.0),
            "550.54.14",
            8.6,
            "is built without CUDA, and there is a GPU with driver",
            "CUDA 12.6",
        ),
        (Build("2.13.0+cpu", 0.0), "580.65.06", 8.6, "torch 2.13.0+cpu is built without CUDA", "CUDA 13.0"),
        (Build("2.13.0+cpu", 0.0), "580.65.06", 6.1, "torch for CUDA 13.0 has no kernels for compute", "CUDA 12.6"),
        (PLAIN, "550.54.14", 6.1, "has no kernels for compute capability 6.1", "CUDA 12.6"),
    ],
)
def test_a_build_that_cannot_use_the_gpu_is_told_from_its_driver_and_card(
    one, driver, capability, reason, remedy, monkeypatch, no_torch
):
    build(monkeypatch, one)
    found = hindrance(driver, capability)
    assert (found is None) == (reason is None)
    if found:
        assert reason in found[0]
        assert remedy in found[1]


def test_a_newer_cuda_next_to_an_old_driver_is_no_hindrance(monkeypatch, no_torch):
    build(monkeypatch, PLAIN)
    for cuda, usable in ((12.04, False), (13.0, True)):
        monkeypatch.setattr(torch_build, "driver_cuda", lambda cuda=cuda: cuda)
        assert (hindrance("535.104", 8.0) is None) == usable


def imported_torch(monkeypatch, available, architectures=()):
    def init():
        raise RuntimeError("CUDA error 802: system not yet initialized\nmore lines")

    answers = {"is_available": lambda: available, "get_arch_list": lambda: [*architectures], "init": init}
    torch = SimpleNamespace(cuda=SimpleNamespace(**answers), version=SimpleNamespace(cuda="13.0"))
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_a_torch_that_is_imported_is_asked_itself(monkeypatch):
    build(monkeypatch, PLAIN)
    imported_torch(monkeypatch, available=False)
    assert (
        "finds no GPU with driver 580.65.06: CUDA error 802: system not yet initialized" in hindrance("580.65.06", 9)[0]
    )
    # The table of drivers does not count: torch has found the GPU.
    imported_torch(monkeypatch, True, ["sm_75", "sm_80", "sm_90", "compute_120"])
    assert hindrance("535.104", 8.9) is None
    assert [has_kernels(capability) for capability in (None, 7.0, 7.5, 9.0, 10.0, 12.1)] == [
        *(True, False, True, True, False, True)
    ]
    assert "no kernels" in hindrance("580.65.06", 6.1)[0]


def test_only_the_gpus_of_this_process_count(tmp_path, monkeypatch, no_torch):
    build(monkeypatch, Build("2.13.0+cpu", 0.0))
    launching.nvidia_smi(tmp_path, "0, GPU-a, 8192, 0, 8.6, 580.1\\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert unusable() is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "built without CUDA" in unusable()[0]
