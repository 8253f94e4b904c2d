"""The GPU tier, ``./launch/test.sh --gpu``: what only a CUDA device can show. Each test gives one line of JSON to send.

Does not run without a CUDA device. Some of it can be rehearsed on the pretended one (tests/gpu_like/), with tiny
models; its figures then say nothing.
"""

import json
from importlib.metadata import version
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    """The name of the GPU."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is here")
    return torch.cuda.get_device_name()


@pytest.fixture(scope="session")
def rehearsal(device) -> bool:
    return device == "pretended GPU"  # of tests/gpu_like/


@pytest.fixture(scope="session")
def model(rehearsal, request) -> str:
    """The folder of the model that the tier uses: SmolLM2-135M-Instruct."""
    return request.getfixturevalue("tiny")() if rehearsal else request.getfixturevalue("smollm")


@pytest.fixture
def figure(device, request, capfd) -> Any:
    """``figure(a=1)``: print the line of this test."""

    def say(**values: Any) -> None:
        versions = {package: version(package) for package in ("torch", "transformers", "trl")}
        with capfd.disabled():
            print(json.dumps({"figure": request.node.name, **values, "device": device, **versions}))

    return say
