"""The training program in this process, on a model that is small enough for the quick tests."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from small_runs import RUN, write_letters_model
from small_trainers import letters

from grpo_math.train.program import main


@pytest.fixture(scope="session")
def letters_model(tmp_path_factory):
    """The folder of a random model whose tokens are letters."""
    return write_letters_model(tmp_path_factory.mktemp("letters"))


@pytest.fixture
def train(letters_model, tmp_path, monkeypatch, capfd):
    """``train(*words, reward=...)`` -> the exit code of a run in ``tmp_path / "run"``, and its lines on stderr."""

    def run(*words, reward=letters, output_dir=tmp_path / "run"):
        module = ModuleType("mine")
        module.reward = reward
        monkeypatch.setitem(sys.modules, "mine", module)
        capfd.readouterr()
        command = [
            "--model_name_or_path",
            letters_model,
            "--output_dir",
            output_dir,
            *RUN,
            "--rewards=mine:reward",
            *words,
        ]
        return main([str(word) for word in command]), capfd.readouterr().err.splitlines()

    return run
