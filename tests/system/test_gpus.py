"""GPUs as nvidia-smi lists them."""

import os
import time
from functools import partial

import launching
import pytest

from grpo_math.errors import ConfigError
from grpo_math.system import gpus
from grpo_math.system.gpus import Gpu, capabilities, count_and_gb, first_gpus, visible_gpus, warnings
from grpo_math.system.machine import main_memory


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Makes a program of that name, alone in PATH but for the system's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return partial(launching.nvidia_smi, tmp_path)


def lines():
    return [finding.message for finding in warnings()]


THREE = "0, GPU-aa, 24576, 0\\n1, GPU-ab, 24576, 9000\\n2, GPU-bb, 81920, 40960\\n"


def test_gpus_with_their_memory_and_who_fills_them(nvidia_smi):
    nvidia_smi(THREE, "GPU-bb, 12, /usr/bin/python3.11\\nGPU-bb, 13, [Not Found]\\n")
    idle, held, used = visible_gpus()
    assert idle == Gpu(0, 24.0, "", uuid="GPU-aa", driver="580.65.06", name="NVIDIA RTX")
    assert held.used_by == "a hidden process with 8.8 GB", "as in a container, which hides the processes of others"
    assert used.used_by == "process 12 (python3.11), process 13 ([Not Found]) with 40.0 GB"
    assert used.gb == 80.0
    assert count_and_gb() == (3, 24.0)


def test_a_card_that_also_draws_a_desktop_is_free_and_has_the_rest_of_its_memory(nvidia_smi):
    rows = "0, GPU-a, 8192, 620\\n1, GPU-b, 24576, 4600\\n2, GPU-c, 8192, 4200\\n3, GPU-d, 81920, 6200\\n"
    nvidia_smi(rows, "GPU-a, 7, /usr/bin/kwin_wayland\\n")
    desktop, larger, held, server = visible_gpus()
    assert (desktop.gb, desktop.used_by, desktop.shared_with) == (7572 / 1024, "", "process 7 (kwin_wayland)")
    assert (larger.gb, larger.used_by, larger.shared_with) == (19976 / 1024, "", "")
    assert (held.gb, held.used_by) == (8.0, "a hidden process with 4.1 GB")
    assert (server.gb, server.used_by) == (80.0, "a hidden process with 6.1 GB")


def test_a_card_that_does_not_state_its_capability_has_none(nvidia_smi):
    nvidia_smi("0, GPU-a, 8192, 900, 8.9\\n1, GPU-b, 8192, 900, [N/A]\\n")
    assert [gpu.capability for gpu in visible_gpus()] == [8.9, None]
    assert capabilities() == (8.9,)


def test_unified_memory_is_main_memory_and_a_card_that_fails_is_named(nvidia_smi):
    nvidia_smi("0, GPU-a, [N/A], [N/A], 12.1\\n1, GPU-b, [GPU is lost], [GPU is lost]\\n2, GPU-c, 8192, 0\\n")
    assert [(gpu.number, gpu.gb) for gpu in visible_gpus()] == [(0, main_memory()), (2, 8.0)]
    assert lines() == ["GPU 1 has no memory that nvidia-smi can read: [GPU is lost]"]


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


SPLIT = "0, GPU-aa, 81920, 500, 8.0, 580.65.06, Enabled, A100\\n1, GPU-bb, 24576, 0\\n"
SLICES = "GPU 0: A100 (UUID: GPU-aa)\\n  MIG 3g.40gb Device 0: (UUID: MIG-c)\\n"
SLICES += "  MIG 1c.3g.40gb+me Device 1: (UUID: MIG-d)\\nGPU 1: RTX (UUID: GPU-bb)\\n"


@pytest.mark.parametrize(
    ("selection", "devices", "gb"),
    [
        (None, ["1"], 24.0),
        ("MIG-d", ["MIG-d"], 36.0),
        ("0", ["MIG-c"], 36.0),
        ("MIG-d,MIG-c", ["MIG-d"], 36.0),  # CUDA gives a process one slice
        ("1", ["1"], 24.0),
        ("MIG-e", [], 0.0),
    ],
)
def test_a_slice_is_a_gpu_that_cuda_finds_by_its_uuid(selection, devices, gb, nvidia_smi, monkeypatch):
    nvidia_smi(SPLIT, slices=SLICES)
    if selection is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", selection)
    assert [gpu.device for gpu in visible_gpus()] == devices
    assert count_and_gb() == (len(devices), gb)
    assert lines() == []


def test_a_machine_with_slices_alone_has_the_first_and_one_without_any_has_a_line(nvidia_smi):
    nvidia_smi(SPLIT.partition("\\n")[0] + "\\n", slices=SLICES)
    assert [(gpu.device, gpu.capability) for gpu in visible_gpus()] == [("MIG-c", 8.0)]
    nvidia_smi(SPLIT.partition("\\n")[0] + "\\n", slices="GPU 0: A100 (UUID: GPU-aa)\\n")
    assert (visible_gpus(), lines()) == ([], ["GPU 0 is in MIG mode, and nvidia-smi -L lists no slice of it"])


MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"


@pytest.mark.parametrize(
    ("gpus", "code", "said"),
    [
        ("", 0, []),
        ("No devices were found\\n", 6, ["nvidia-smi: No devices were found"]),
        (f"\\n{MISMATCH}\\nNVML library version: 580.95\\n", 18, [f"nvidia-smi: {MISMATCH}"]),
        ("", 9, ["nvidia-smi: exit code 9"]),
    ],
)
def test_a_nvidia_smi_that_fails_lists_none_and_is_quoted(gpus, code, said, nvidia_smi):
    nvidia_smi(gpus, code=code)
    assert (visible_gpus(), count_and_gb()) == ([], (0, 0.0))
    assert lines() == said
    with pytest.raises(ConfigError, match="0 GPUs are visible here") as error:
        first_gpus(1)
    assert all(line in str(error.value) for line in said)


def test_a_nvidia_smi_without_an_answer_is_asked_once(nvidia_smi, tmp_path, monkeypatch):
    nvidia_smi(THREE)
    launching.write_program(tmp_path / "nvidia-smi", "#!/bin/sh\nexec sleep 9\n")
    monkeypatch.setattr(gpus, "SECONDS", 0.2)
    started = time.monotonic()
    assert lines() == ["nvidia-smi has not answered in 0.2 s"]
    assert visible_gpus() == visible_gpus() == []
    assert time.monotonic() - started < 5


def test_nvidia_smi_of_wsl_is_found_outside_of_the_path(tmp_path, monkeypatch):
    launching.nvidia_smi(tmp_path, THREE)
    monkeypatch.setattr(gpus, "WSL", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert len(visible_gpus()) in (0, 3)  # the stand-in needs sh's printf alone


MIXED = "0, GPU-old, 2048, 0, 6.1, 580.65.06, [N/A], GT 1030\\n1, GPU-new, 24576, 0, 8.9\\n"


def test_a_card_without_kernels_is_left_out_next_to_another_with_a_line_to_paste(nvidia_smi, monkeypatch):
    nvidia_smi(MIXED)
    assert count_and_gb() == (1, 24.0)
    (finding,) = warnings()
    assert "has no kernels for GPU 0 (GT 1030, 6.1)" in finding.message
    assert finding.remedy == "export CUDA_VISIBLE_DEVICES=GPU-new"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert (count_and_gb(), lines()) == ((1, 2.0), []), "a single card stays, and unusable() refuses it"


@pytest.mark.parametrize(
    ("rows", "selection", "expected"),
    [
        (THREE, None, "GPU-aa"),
        (THREE, "2,0", "GPU-bb"),
        (THREE, "1", "1"),
        (MIXED, None, "GPU-new"),
        ("0, GPU-aa, 24576, 0\\n", None, None),
        ("", None, None),
    ],
)
def test_one_process_sees_the_first_gpu_that_it_can_use(rows, selection, expected, nvidia_smi, monkeypatch):
    nvidia_smi(rows)
    if selection:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", selection)
    gpus.use_first_gpu()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected


def test_a_command_says_that_it_computes_on_the_cpu_next_to_a_gpu(nvidia_smi, monkeypatch, capsys):
    nvidia_smi(THREE)
    gpus.use_one_gpu()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(gpus, "unusable", lambda: ("torch is built without CUDA", "install another"))
    gpus.use_one_gpu()
    assert capsys.readouterr().err == (
        "warning: torch is built without CUDA, so this runs on the CPU: install another\n"
    )
