"""The GPU tier, ``./launch/test.sh --gpu [PART ...]``: what only a CUDA device can show. PART ends a name of a file.

Each test prints one line of JSON and appends the line to $GRPO_MATH_FIGURES (runs/figures.jsonl). No test starts after
$GRPO_MATH_GPU_SECONDS: the rest fails as not measured. Without a CUDA device every test fails. Some tests can be
rehearsed on the pretended device (tests/gpu_like/), with tiny models. Their figures then say nothing.
"""

import json
import os
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

LIMIT = 240  # seconds of a test
STARTED = time.monotonic()


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.timeout(LIMIT))


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    """The name of the GPU."""
    import torch

    if not torch.cuda.is_available():
        pytest.fail("no CUDA device is here: nothing was measured", pytrace=False)
    return torch.cuda.get_device_name()


@pytest.fixture(autouse=True)
def budget() -> None:
    """Fail a test that would start after the end of the budget."""
    seconds = float(os.environ.get("GRPO_MATH_GPU_SECONDS", "inf"))
    if time.monotonic() - STARTED > seconds:
        pytest.fail(f"not measured: the {seconds:.0f} seconds of GRPO_MATH_GPU_SECONDS are over", pytrace=False)


@pytest.fixture(scope="session")
def rehearsal(device) -> bool:
    return device == "pretended GPU"  # of tests/gpu_like/


@pytest.fixture(scope="session")
def model(rehearsal, request) -> str:
    """The folder of the model that the tier uses: SmolLM2-135M-Instruct."""
    return request.getfixturevalue("tiny")() if rehearsal else request.getfixturevalue("smollm")


@pytest.fixture
def figure(device, request, capfd) -> Any:
    """``figure(says="9 ms", a=1)``: print the line of this test, and append the line to the file of figures.

    ``says`` is what the table of docs/scaling.md shows.
    """
    command = f"./launch/test.sh --gpu {request.path.stem.removeprefix('test_')}"
    file = Path(os.environ.get("GRPO_MATH_FIGURES", "runs/figures.jsonl"))

    def say(says: str, **values: Any) -> None:
        versions = {package: version(package) for package in ("torch", "transformers", "trl")}
        line = json.dumps(
            {"figure": request.node.name, "says": says, **values, "command": command, "device": device, **versions}
        )
        # Users send the file.
        assert tempfile.gettempdir() not in line
        assert str(Path.home()) not in line
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as figures:
            figures.write(line + "\n")
        with capfd.disabled():
            print(line, flush=True)

    return say
