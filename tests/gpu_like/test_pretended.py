"""Start pytest with the pretended device: for the tests of this folder, and to rehearse the tests that need a GPU.

A rehearsal shows that these tests run. What they measure there says nothing.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_like import device

ROOT = Path(__file__).parents[2]
REHEARSED = [
    "tests/gpu/test_update.py::test_the_gradient_is_that_of_trl[float32-16-gsm8k]",
    "tests/gpu/test_memory.py::test_a_measurement_agrees_with_the_plan_of_each_phase[lora]",
    "tests/gpu/test_card.py",
    "tests/gpu/test_profile.py::test_an_update_waits_for_the_gpu_as_rarely_as_on_the_pretended_one[16]",
    "tests/gpu/test_generation.py::test_generation_gives_the_tokens_of_transformers[float32]",
    "tests/gpu/test_demo.py",
]


@pytest.mark.full
@pytest.mark.parametrize("names", [["tests/gpu_like"], REHEARSED], ids=["of this folder", "of the GPU tier"])
def test_the_tests_pass_on_the_pretended_gpu(names):
    if reason := device.hindrance():
        pytest.skip(f"no pretended GPU: {reason}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {device.VARIABLE: "1", "CUDA_VISIBLE_DEVICES": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    assert "skipped" not in done.stdout.splitlines()[-1]
