"""Every shipped file parses with the loader that will read it, and says how it is run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from grpo_math.train import Parser, check

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "launch/configs").glob("*.yaml"))
ACCELERATE = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_parses_with_the_real_config_class_and_passes_its_checks(path, tmp_path):
    train_args, config, model_args = Parser().parse(["--config", str(path), "--output_dir", str(tmp_path)])
    check(train_args, config, tmp_path)
    assert model_args.model_name_or_path
    assert config.generation_batch_size % config.num_generations == 0


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_begins_with_what_it_does_and_its_one_command(path):
    comment = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert len(comment) >= 2
    assert any(f"--config launch/configs/{path.name}" in line for line in comment)


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_accelerate_reads_its_own_files(path):
    assert load_config_from_file(str(path)).num_processes == yaml.safe_load(path.read_text())["num_processes"]
    assert path.read_text().startswith("#")
