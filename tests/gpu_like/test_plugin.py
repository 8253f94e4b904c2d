"""Where there can be no pretended device, a marked test is skipped with the reason."""

from __future__ import annotations

import pytest
from gpu_like import device


def test_without_a_compiler_the_reason_is_said(monkeypatch):
    if device.hindrance():
        pytest.skip("there is another reason here")
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    assert device.hindrance() == "there is no g++"
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    assert device.hindrance() == "torch is not installed"


@pytest.mark.full
@pytest.mark.pretended_gpu
def test_a_marked_test_has_the_device_and_its_fixtures(tmp_path):
    import torch

    assert tmp_path.is_dir()
    assert torch.cuda.get_device_name() == "pretended GPU"
