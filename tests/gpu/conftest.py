"""The GPU tier, ``./launch/test.sh --gpu``: what only a CUDA device can show. Each test gives one line of JSON to send.

Does not run without a CUDA device. Some of it can be rehearsed on the pretended one (tests/gpu_like/), with tiny
models; its figures then say nothing.
"""

import json
from pathlib import Path
from typing import Any

import pytest

_figures: list[str] = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("gpu")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _figures:
        terminalreporter.section("figures of this GPU: a line each, to send")
        for line in _figures:
            terminalreporter.write_line(line)


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
def figure(device, request) -> Any:
    """``figure(a=1)``: the line of this test."""
    import torch
    import transformers
    import trl

    def say(**values: Any) -> None:
        versions = {package.__name__: package.__version__ for package in (torch, transformers, trl)}
        _figures.append(json.dumps({"figure": request.node.name, **values, "device": device, **versions}))

    return say
