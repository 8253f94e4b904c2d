"""Shipped files go by their names of the checkout, from any folder. In an installed copy: test_wheel.py."""

from pathlib import Path
from statistics import fmean
from unittest.mock import Mock

import pytest
import yaml
from benchmarks.reward_farms import blind, hedged

from grpo_math.cli import main
from grpo_math.grading.formats import example_completion
from grpo_math.rewards import load_reward
from grpo_math.settings.accelerate import shipped_configs
from grpo_math.settings.run_settings import RunSettings
from grpo_math.settings.shipped import find

ROOT = Path(__file__).parents[2]
RECIPES = {path: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / "launch/configs").glob("*.yaml")}


def test_a_file_that_is_here_comes_before_the_shipped_one_of_that_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert find("deepspeed/zero2.json") == ROOT / "deepspeed/zero2.json"
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed/zero2.json").write_text("{}")
    assert find("deepspeed/zero2.json") == Path("deepspeed/zero2.json")


@pytest.mark.parametrize(
    ("name", "folder", "file"),
    [("gsm8k_8gb", "launch/configs", "gsm8k_8gb.yaml"), ("zero2.yaml", "accelerate_configs", "zero2.yaml")],
)
def test_a_recipe_or_an_accelerate_config_is_copied_once(name, folder, file, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert [main(["train", "--copy", name]) for _ in range(2)] == [0, 2]
    assert Path(file).read_bytes() == (ROOT / folder / file).read_bytes()
    refusal = f"error: copy={name!r} exists already, as {file}: rename that, or go to another folder\n"
    assert capsys.readouterr() == (f"copied   {file}\n", refusal)
    Path(file).unlink()
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert main(["train", "--copy", name]) == 2
    assert capsys.readouterr().err == (
        f"error: copy={name!r} cannot be written (Permission denied): go to another folder\n"
    )


@pytest.mark.parametrize(
    ("recipe", "tried"),
    [
        ({"deepspeed": "zero2.json"}, [""]),
        ({"fsdp": "full_shard"}, [""]),
        ({"use_cpu": True}, [""]),
        ({"eval_n": 4}, ["", "zero2", "zero2_offload"]),  # by the model itself, which ZeRO-3 splits
        ({"eval_n": 4, "use_vllm": True}, ["", "zero2", "zero2_offload", "zero3", "zero3_offload"]),
    ],
)
def test_the_shipped_configs_that_are_tried_suit_the_recipe(recipe, tried):
    assert [*shipped_configs(RunSettings(recipe))] == tried


GOLDS = [str(n) for n in range(1003, 1183, 9)]  # none of them is a constant that is tried


def paid(rewards: list, template: str, texts: list[str], problems: list[str]) -> float:
    """What the rewards of a recipe pay these completions together, on average."""
    shared = {"answer": GOLDS, "answer_format": [template] * len(GOLDS), "max_completion_length": 1024}
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    return fmean(sum(row) for row in zip(*(reward(problems, completions, **shared) for reward in rewards), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted(path for path in RECIPES if RECIPES[path]["rewards"]), ids=lambda path: path.stem
)
def test_a_shipped_recipe_with_rewards_pays_nothing_to_a_policy_that_does_not_decide_on_an_answer(path):
    recipe = RECIPES[path]
    template, problems = recipe["prompt_template"], [f"What is {int(gold) - 1} + 1?" for gold in GOLDS]
    rewards = [load_reward(name) for name in recipe["rewards"]]
    assert paid(rewards, template, [example_completion(gold, template) for gold in GOLDS], problems) >= 1
    tried = {name: [text] * len(GOLDS) for name, text in blind(template).items()}
    tried["the problem"] = problems
    tried["the problem in the format"] = [example_completion(problem, template) for problem in problems]
    for gold in GOLDS:
        for name, text in hedged(gold, str(int(gold) + 7), template).items():
            tried.setdefault(name, []).append(text)
        candidates = ", ".join(str(int(gold) + i) for i in range(3))
        tried.setdefault("3 candidates", []).append(example_completion(candidates, template))
    del tried["two answers"]  # the last one may count, as below
    assert {name: output for name, texts in tried.items() if (output := paid(rewards, template, texts, problems))} == {}


@pytest.mark.parametrize("path", [*RECIPES, ROOT / "examples/own_reward.yaml"], ids=lambda p: p.stem)
def test_a_shipped_recipe_states_the_epsilon_that_its_figures_were_measured_with(path):
    assert yaml.safe_load(path.read_text())["advantage_eps"] == 1e-6
