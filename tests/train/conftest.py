"""The training program in this process, on a model that is small enough for the quick tests."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from small_model import small
from small_runs import RUN
from small_trainers import letters

from grpo_math.train.program import main

__all__ = ["small"]


@pytest.fixture
def train(small, tmp_path, monkeypatch, capfd):
    """``train(*words, reward=...)`` -> the exit code of a run in ``tmp_path / "run"``, and its lines on stderr."""

    def run(*words, reward=letters, output_dir=tmp_path / "run"):
        module = ModuleType("mine")
        module.reward = reward
        monkeypatch.setitem(sys.modules, "mine", module)
        capfd.readouterr()
        command = ["--model_name_or_path", small, "--output_dir", output_dir, *RUN, "--rewards=mine:reward", *words]
        return main([str(word) for word in command]), capfd.readouterr().err.splitlines()

    return run
