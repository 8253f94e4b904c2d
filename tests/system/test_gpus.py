"""GPUs as nvidia-smi lists them."""

import os
from functools import partial

import launching
import pytest

from grpo_math.system.gpus import Gpu, capabilities, count_and_gb, visible_gpus


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Makes a program of that name, alone in PATH but for the system's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return partial(launching.nvidia_smi, tmp_path)


THREE = "0, GPU-aa, 24576, 3\\n1, GPU-ab, 24576, 9000\\n2, GPU-bb, 81920, 500\\n"


def test_gpus_with_their_memory_and_who_uses_them(nvidia_smi):
    nvidia_smi(THREE, f"GPU-bb, 12\\nGPU-bb, 13\\nGPU-aa, {os.getpid()}\\n")
    idle, held, used = visible_gpus()
    assert idle == Gpu(0, 24.0, "")
    assert held.used_by == "a hidden process with 8.8 GB", "as in a container, which hides the processes of others"
    assert used.used_by == "process 12, 13"
    assert count_and_gb() == (3, 24.0)


def test_a_card_that_also_draws_a_desktop_is_free_and_has_the_rest_of_its_memory(nvidia_smi):
    nvidia_smi("0, GPU-a, 8192, 900\\n1, GPU-b, 24576, 4600\\n2, GPU-c, 8192, 4200\\n")
    desktop, larger, held = visible_gpus()
    assert desktop == Gpu(0, 7292 / 1024, "")
    assert larger.used_by == ""
    assert held == Gpu(2, 8.0, "a hidden process with 4.1 GB")


def test_a_card_that_does_not_state_its_capability_has_none(nvidia_smi):
    nvidia_smi("0, GPU-a, 8192, 900, 8.9\\n1, GPU-b, 8192, 900, [N/A]\\n", more="")
    assert [gpu.capability for gpu in visible_gpus()] == [8.9, None]
    assert capabilities.__wrapped__() == (8.9,)


@pytest.mark.parametrize(
    ("expected", "numbers"),
    [
        ("2,0", [2, 0]),
        ("GPU-b,1", [2, 1]),
        ("", []),
        ("-1", []),
        ("0,7,1", [0]),
        ("1,1", [1]),
        ("GPU-a", []),
        ("0", [0]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(expected, numbers, nvidia_smi, monkeypatch):
    nvidia_smi(THREE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", expected)
    assert [gpu.number for gpu in visible_gpus()] == numbers


@pytest.mark.parametrize(
    ("gpus", "code"), [("", 0), ("No devices were found\\n", 6), ("0, GPU-aa, [N/A], [N/A]\\n", 0), (THREE, 1)]
)
def test_where_nvidia_smi_says_nothing_there_are_none(gpus, code, nvidia_smi):
    nvidia_smi(gpus, code=code)
    assert visible_gpus() == []
    assert count_and_gb() == (0, 0.0)
