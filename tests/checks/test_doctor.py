"""`grpo-math doctor`: a line for each bad setting, the same in training; the shipped recipes.

The cases are in tests/cases/bad_configs.yaml.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_math.checks.doctor import doctor
from grpo_math.cli import main
from grpo_math.train import program

ROOT = Path(__file__).parents[2]
BASE = yaml.safe_load((ROOT / "launch/configs/demo_cpu.yaml").read_text()) | {"output_dir": "run"}
CASES = yaml.safe_load((ROOT / "tests/cases/bad_configs.yaml").read_text())
ERRORS = [case for case in CASES if case["says"].startswith("error")]
ONE_OF_EACH_CHECK = list({case["says"].rpartition("(")[2]: case for case in ERRORS}.values())
RECIPES = sorted((ROOT / "launch/configs").glob("*.yaml"))
# What a machine without a GPU, a network or an optional package cannot have: no fault of a recipe.
LACKING = re.compile(r"not installed|needs a GPU|HF_HUB_OFFLINE is set|needs the package|cannot be had from the Hub")

REWARDS = """
def raises(completions, **columns):
    raise KeyError("x")

def one(completions, **columns):
    return [1.0]

def nan(completions, **columns):
    return [float("nan")] * len(completions)

def mapping(completions, **columns):
    return dict.fromkeys(range(len(completions)), 1.0)

def huge(completions, **columns):
    return [1e308] * len(completions)

def upside_down(completions, grade, **columns):
    return [float(g.verdict != "correct") for g in grade]
"""
NO_WEIGHTS = "\2\0\0\0\0\0\0\0{}"  # of safetensors: the length of a header, and an empty one
FILES = {
    "file": "x",
    "folder/x": "",
    "empty.jsonl": "",
    "no_gold.jsonl": '{"problem": "1 + 1"}\n',
    "half_golds.jsonl": "".join(f'{{"problem": "p{i}", "answer": "\\\\frac{{{i}}}{{"}}\n' for i in range(20)),
    "rows.jsonl": "".join(f'{{"problem": "What is {i} + 1?", "answer": "{i + 1}"}}\n' for i in range(20)),
    "stage.json": '{"zero_optimization": {"stage": "two"}}',
    "empty_model/x": "",
    "bare_model/config.json": '{"model_type": "llama"}',
    "odd_model/config.json": '{"model_type": "nosuch"}',
    "odd_model/model.safetensors": NO_WEIGHTS,
    "earlier/history.jsonl": "{}\n",
    "odd_rewards.py": REWARDS,
}


MODELS = {  # of the tiny model: a file, and what its JSON says otherwise, or the text that it becomes
    "heads_model/config.json": {"num_attention_heads": 3},
    "wide_model/config.json": {"intermediate_size": 64},
    "cut_model/model.safetensors": "version https://git-lfs.github.com/spec/v1\n",
    "chat_model/chat_template.jinja": "{% if",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    for name, says in MODELS.items():
        file = folder / name
        shutil.copytree(tiny(), file.parent)
        file.write_text(says if isinstance(says, str) else json.dumps(json.loads(file.read_text()) | says))
    return folder


@pytest.fixture
def here(folder, monkeypatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


def recipe(folder: Path, settings: dict) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(BASE | settings))
    return str(path)


def lines(*argv: str) -> list[str]:
    return [finding.line() for finding in doctor(argv) if finding.level != "info"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["what"])
def test_a_bad_setting_gives_one_line(case, here):
    says = case["says"].replace("CWD", str(here))
    results = lines("--config", recipe(here, case["set"]))
    assert [line for line in results if "(memory)" not in line] == [
        says
    ]  # whether a CPU's memory is enough, is its own


@pytest.mark.slow
@pytest.mark.parametrize("case", ONE_OF_EACH_CHECK, ids=lambda case: case["what"])
def test_training_ends_with_the_same_line_before_it_loads_weights(case, here, capsys, monkeypatch):
    def no_weights(*arguments):
        raise AssertionError("weights were to be loaded")

    monkeypatch.setattr(program, "trainer_of", no_weights)
    assert program.main(["--config", recipe(here, case["set"])]) == 2
    refused = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    message, _, remedy = case["says"].replace("CWD", str(here)).rpartition(". Remedy: ")
    assert refused == [f"{message}: {remedy.rpartition(' (')[0]}"]
    assert not (here / "run").exists(), "a refused run leaves nothing behind"


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_has_no_error_but_what_this_machine_lacks(path, tmp_path):
    results = doctor(["--config", str(path), "--output_dir", str(tmp_path / "run")])
    errors = [finding.line() for finding in results if finding.level == "error"]
    assert not [line for line in errors if not LACKING.search(line)]


@pytest.mark.slow
def test_the_json_is_one_object_of_the_documented_form(here, capsys):
    assert main(["doctor", "--config", recipe(here, {}), "--json", "--beta", "0.04", "--lora_dropout=0.1"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    answer = json.loads(out)
    assert answer["ok"] is True
    assert all(set(finding) == {"level", "check", "message", "remedy"} for finding in answer["findings"])
    assert "settings" in [finding["check"] for finding in answer["findings"] if finding["level"] == "warning"]


def test_the_accelerate_config_says_how_many_processes_share_a_step(here, tmp_path):
    config = tmp_path / "accelerate.yaml"
    config.write_text("distributed_type: MULTI_CPU\nnum_processes: 3\n")
    results = list(doctor(["--config", recipe(here, {"prompts_per_step": 8})], accelerate_config=str(config)))
    assert any("which 3 processes cannot share evenly: use 9" in f"{f.message}: {f.remedy}" for f in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "settings", "out", "err"),
    [
        (
            "doctor",
            {"num_generations": 7, "beta": -1},
            [
                "error: beta=-1 is out of range. Remedy: give a number of 0 or more (settings)",
                "not ok: 2 errors, no warning",
                "1 False",
            ],
            "",
        ),
        (
            "train",
            {"rewards": ["odd_rewards:raises"]},
            ["2 False"],
            "error: reward function raises raised KeyError: 'x' at CWD/odd_rewards.py:3: correct the function\n",
        ),
        pytest.param("train", {"tf32": True}, ["2 True"], "error: tf32=True is refused", marks=pytest.mark.full),
    ],
    ids=["doctor", "training before torch is imported", "training after that"],
)
def test_a_refusal_is_all_that_is_said_and_torch_is_imported_only_if_it_is_needed(command, settings, out, err, here):
    program = (
        "import sys\nfrom grpo_math.cli import main\n"
        f"code = main([{command!r}, '--config', {recipe(here, settings)!r}])\n"
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    output = done.stdout.splitlines()
    assert [line for line in output if line in out] == out
    assert output[-1] == out[-1]
    assert done.stderr.startswith(err.replace("CWD", str(here)))
    assert done.stderr.count("\n") == bool(err)
