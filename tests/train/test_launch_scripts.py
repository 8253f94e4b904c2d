"""launch/*.sh with stand-ins for the commands that they call; the sbatch scripts are in test_slurm.py."""

from __future__ import annotations

import os
import subprocess

import pytest
from launching import ROOT

from grpo_math.generation.server import SUPPORTED


@pytest.fixture
def output(tmp_path):
    """A function: run a script, and get the commands that it called, one a line."""
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "python").write_text('#!/usr/bin/env bash\necho "python $*"\n')
    (commands / "python").chmod(0o755)

    def call(script, *arguments, code=0):
        environment = {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}
        command = [str(ROOT / "launch" / script), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        return done.stdout.splitlines() or done.stderr.splitlines()

    return call


def test_train_gives_accelerate_what_stands_before_the_dashes_and_the_recipe_the_rest(output):
    before, after = ["--num_processes", "4"], ["--seed", "1"]
    expected = "python -m grpo_math.train.ranks --config_file a.yaml {}-m grpo_math.train --config r.yaml --seed 1"
    assert output("train.sh", "r.yaml", "a.yaml", *before, "--", *after) == [expected.format("--num_processes 4 ")]
    assert output("train.sh", "r.yaml", "a.yaml", *after) == [expected.format("")]


def test_a_script_without_arguments_says_how_it_is_called(output):
    assert any("./launch/train.sh R" in line for line in output("train.sh", code=2))


def test_every_place_that_names_vllms_range_names_the_same():
    for position in ("pyproject.toml", "grpo_math/train/vllm_env.py"):
        assert f'"vllm{SUPPORTED}"' in (ROOT / position).read_text()
