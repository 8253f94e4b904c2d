"""Shipped files go by their names of the checkout, from any folder. In an installed copy: test_wheel.py."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from benchmarks.reward_farms import blind, hedged

from grpo_math.cli import main
from grpo_math.grading.formats import made_up
from grpo_math.rewards import load_reward
from grpo_math.settings.shipped import INSTALLED, find

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


def test_recipes_are_listed_with_what_they_are_and_accelerate_configs_with_their_paths(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--list"]) == 0
    text = capsys.readouterr().out
    for path in (ROOT / "launch/configs").glob("*.yaml"):
        assert f"\n{path.stem} " in f"\n{text}"
    assert "GSM8K on one consumer GPU of 8 GB" in text
    for path in (ROOT / "accelerate_configs").glob("*.yaml"):
        assert f"{path.stem:<24} {path}" in text
    assert main(["train"]) == 0
    assert capsys.readouterr().out == text


def test_a_recipe_or_an_accelerate_config_is_copied_once(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, there in (
        ("gsm8k_8gb", "launch/configs/gsm8k_8gb.yaml"),
        ("zero2.yaml", "accelerate_configs/zero2.yaml"),
    ):
        assert main(["train", "--copy", name]) == 0
        assert (tmp_path / Path(there).name).read_bytes() == (ROOT / there).read_bytes()
        assert main(["train", "--copy", name]) == 2
        assert "is here already" in capsys.readouterr().err
    assert main(["train", "--copy", "gsm8k_9gb"]) == 2
    assert "did you mean 'gsm8k_8gb'?" in capsys.readouterr().err


def test_no_message_names_a_file_that_is_not_shipped():
    """From the wheel there is no docs/, no launch/*.sh, no examples/: a hint to them alone leads nowhere."""
    found = []
    for path in sorted((ROOT / "grpo_math").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        bodies = [
            node.body[0] for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list) and node.body
        ]
        docs = {id(first.value) for first in bodies if isinstance(first, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                names = re.findall(
                    r"\b(?:docs|launch|examples|tests|deepspeed|accelerate_configs)/[\w./-]*\w", node.value
                )
                found += [(path.name, name) for name in names if "NAME" not in name and not shipped(name)]
    assert found == [("groups.py", "docs/settings.md")]  # `train --help` names --help-all next to it


def shipped(name: str) -> bool:
    folder = Path(name).parent.as_posix()
    return name in INSTALLED or (folder in INSTALLED and (ROOT / name).exists())


GOLDS = [str(n) for n in range(1003, 1183, 9)]  # none of them is a constant that is tried


def paid(rewards: list[Any], template: str, texts: list[str], problems: list[str]) -> float:
    """What the rewards of a recipe pay these completions together, on average."""
    shared = {"answer": GOLDS, "answer_format": [template] * len(GOLDS), "max_completion_length": 1024}
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    return fmean(sum(row) for row in zip(*(reward(problems, completions, **shared) for reward in rewards), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "launch/configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_recipe_pays_nothing_to_a_policy_that_does_not_decide_on_an_answer(path):
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    template, problems = recipe["prompt_template"], [f"What is {int(gold) - 1} + 1?" for gold in GOLDS]
    rewards = [load_reward(name) for name in recipe["rewards"]]
    right = paid(rewards, template, [made_up(gold, template) for gold in GOLDS], problems)
    assert right >= 1
    tried = {name: [text] * len(GOLDS) for name, text in blind(template).items()}
    tried["the problem"] = problems
    tried["the problem in the format"] = [made_up(problem, template) for problem in problems]
    for gold in GOLDS:
        for name, text in hedged(gold, str(int(gold) + 7), template).items():
            tried.setdefault(name, []).append(text)
    for k in (3, 10):
        several = [", ".join(str(int(gold) + i) for i in range(k)) for gold in GOLDS]
        tried[f"{k} candidates"] = [made_up(text, template) for text in several]
    del tried["two answers"]  # the last one may count, as below
    assert {name: said for name, texts in tried.items() if (said := paid(rewards, template, texts, problems))} == {}
    # Of k whole answers at most one place counts, so that they are worth no more than one guess.
    for k in (2, 4):
        places = [
            ["\n".join(made_up(str(int(gold) + i - place), template) for i in range(k)) for gold in GOLDS]
            for place in range(k)
        ]
        assert sum(paid(rewards, template, texts, problems) for texts in places) <= right
