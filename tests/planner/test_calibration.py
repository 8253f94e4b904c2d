"""A calibration in later plans, and what `--calibrate` refuses. tests/gpu/test_memory.py makes one."""

import json
from pathlib import Path

import pytest
from launching import nvidia_smi

from grpo_math.cli import main
from grpo_math.planner import calibration
from grpo_math.planner.memory import FRAGMENTATION
from grpo_math.settings.fields import defaults
from grpo_math.settings.recipe import read_recipe
from grpo_math.system.machine import GB

RECIPE = str(Path(__file__).parents[2] / "launch/configs/gsm8k_8gb.yaml")
PLAN = ["plan", "--config", RECIPE, "--json"]
MEASURED = calibration.Calibration(
    date="2026-11-29",
    torch="2.13.0",
    tflops=50.0,
    float32=10.0,
    bandwidth=800.0,
    launch_us=6.0,
    context=GB,
    recipe={name: {**defaults(), **read_recipe(RECIPE)}[name] for name in calibration.SAME},
    fragmentation=0.01,
    shares={"training": 0.4, "generation": 0.1},
    rows=[["training, seconds", "4 to 10", "6"]],
)


@pytest.fixture
def card(tmp_path, monkeypatch):
    """Name the GPU of this machine, which has 8 GB and a calibration."""

    def name(card: str) -> None:
        nvidia_smi(tmp_path / "bin", "0, GPU-1, 8192, 0\\n", more=f", {card}, 8.9")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setattr(calibration, "cache_dir", lambda: tmp_path)
    name("RTX 4060")
    calibration.store(MEASURED)
    return name


def planned(capsys, *options):
    main([*PLAN, *options])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "fragmentation", "words"),
    [
        ([], 0.01, "measured on this card on 2026-11-29 with torch 2.13.0; 8 GB card"),
        (
            ["--gradient_checkpointing", "false", "--max_completion_length", "256"],
            FRAGMENTATION["transformers"],
            "rates measured on this card on 2026-11-29 with torch 2.13.0, the shares never; 8 GB card with 50 TFLOP/s",
        ),
    ],
    ids=["the same recipe", "another recipe, which uses the rates alone"],
)
def test_a_plan_uses_what_was_measured(options, fragmentation, words, card, capsys):
    answer = planned(capsys, *options)
    terms = answer["phases"]["training"]
    allocated = sum(size for term, size in terms.items() if term not in ("CUDA_context", "fragmentation"))
    assert terms["CUDA_context"] == GB
    assert terms["fragmentation"] == int(fragmentation * allocated)
    assert answer["seconds"]["assumed"].startswith(words)


def test_a_plan_prints_what_was_measured_next_to_what_it_says(card, capsys):
    for low, high in planned(capsys)["seconds"]["ranges"].values():
        assert high <= 1.5 * low
    main(PLAN[:-1])
    printed = capsys.readouterr().out
    assert "measured on this card on 2026-11-29 with torch 2.13.0" in printed
    assert "training, seconds              plan 4 to 10, measured 6" in printed


def test_without_any_calibration_nvidia_smi_is_not_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(calibration, "visible_gpus", None)
    assert calibration.stored() is None


@pytest.mark.parametrize("other", ["card", "torch", "described"])
def test_another_card_another_torch_and_described_hardware_are_not_calibrated(other, card, capsys, monkeypatch):
    if other == "card":
        card("RTX 4070")
    elif other == "torch":
        monkeypatch.setattr(calibration, "versions", lambda: {"torch": "2.14.0"})
    options = ["--gpu_memory", "8", "--gpus", "1"] if other == "described" else []
    answer = planned(capsys, *options)
    assert "calibration" not in answer
    assert answer["seconds"] is None


def test_a_calibration_without_a_gpu_or_for_another_card_is_refused_in_one_line(card, capsys, monkeypatch):
    assert main([*PLAN, "--calibrate", "--card", "l4"]) == 2
    assert "leave out --card, --gpu_memory and --nodes" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    assert main([*PLAN, "--calibrate"]) == 2
    assert (
        capsys.readouterr().err
        == "error: calibrate=True needs a GPU, and this machine has none: run it where you will train\n"
    )


@pytest.mark.full
def test_a_process_that_measures_nothing_ends_the_calibration_in_its_own_line(card, capfd):
    """Here torch is built for CPUs, or sees no GPU."""
    assert main([*PLAN, "--calibrate"]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert "error: nvidia-smi lists a GPU that torch does not see: install torch for CUDA" in lines
    assert lines[-1] == "error: nothing was measured in 90 seconds: the lines above may say why"
