"""Shipped files go by their names of the checkout, from any folder. In an installed copy: test_wheel.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_math.settings.shipped import find

ROOT = Path(__file__).parents[2]


def test_a_file_that_is_here_comes_before_the_shipped_one_of_that_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert find("deepspeed/zero2.json") == ROOT / "deepspeed/zero2.json"
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed/zero2.json").write_text("{}")
    assert find("deepspeed/zero2.json") == Path("deepspeed/zero2.json")


@pytest.mark.slow
def test_what_is_nowhere_keeps_its_name_so_that_the_error_says_it(monkeypatch, tmp_path, capsys):
    from grpo_math.train.program import main

    monkeypatch.chdir(tmp_path)
    assert find("launch/configs/none.yaml") == Path("launch/configs/none.yaml")
    assert main(["--config", "launch/configs/none.yaml"]) == 2
    assert "launch/configs/none.yaml" in capsys.readouterr().err


@pytest.mark.slow
def test_training_finds_the_deepspeed_file_that_an_accelerate_config_names(monkeypatch, tmp_path):
    """accelerate hands the name on as it stands in the YAML, and would look in the current folder alone."""
    from grpo_math.train.program import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "deepspeed/zero3.json")
    assert main(["--config", "launch/configs/none.yaml"]) == 2
    assert Path(os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]) == ROOT / "deepspeed/zero3.json"
