"""Mistakes in recipes, files and options: one line, exit code 2, no traceback. Hostile text and broken streams too."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from grpo_math.cli import main
from grpo_math.errors import UserError
from grpo_math.evaluation.figures import summary
from grpo_math.run import streams
from grpo_math.yaml_files import read_yaml

BASE = "model_name_or_path: embedded\ndataset: generated\n"
GPU = ("--gpus", "1", "--gpu_memory", "24")
ROW = {"id": "a", "problem": "1 + 1", "gold": "2", "completion": "#### 2", "category": "correct"}


def results(row=(), **fields):
    rows = [{**ROW, **dict(row)}]
    return json.dumps({"format": 1, "grader": 12, "template": "gsm8k", **summary(rows), "rows": rows, **fields})


RECIPES = {
    "a misspelt field": ("learning_rat: 1", "--learning_rat is not a setting: did you mean --learning_rate?"),
    "a field of another program": ("lr: 1", "--lr is not a setting: did you mean --learning_rate?"),
    "a word for a number": ("seed: fast", "seed='fast' is not a whole number: give a whole number"),
    "a number out of range": ("learning_rate: '5'", "learning_rate='5' is out of range: give a number above 0"),
    "no without quotes": ("save_strategy: no", "save_strategy=False is not a text: put it in quotes, since YAML reads"),
    "a date": ("learning_rate: 2020-01-01", "is not a number: give a number"),
    "a field twice": ("seed: 1\nseed: 2", "recipe.yaml cannot be read (YAMLError: seed is given twice, in line 4)"),
    "no YAML": ("seed: [1, 2", "recipe.yaml cannot be read (ParserError: while parsing a flow sequence"),
    "a variable that cannot be": ("env: {'A=B': 1}\nuse_cpu: true\nbf16: false", "illegal environment variable name"),
    "a wrong path": ("deepspeed: nowhere.json", "nowhere.json cannot be read (No such file or directory)"),
    "a batch that does not come out even": ("num_generations: 7", "which is not a whole number of groups of 7: use 7"),
}
FILES = {
    "good.jsonl": '{"gold": "2", "prediction": "#### 2"}\n',
    "deep.jsonl": f'{{"gold": "2", "prediction": {"[" * 100_000}',
    "digits.jsonl": f'{{"gold": "2", "prediction": {{"{"9" * 5000}}}',
    "format.jsonl": '{"gold": "2", "prediction": "2", "format": ["a"]}',
    "half.json": '{"schema": 1, "rows": [{"id',
    "whole.json": results(),
    "token.yaml": BASE + "hub_token: hf_secret: 1",
    "stage.json": '{"zero_optimization": {"stage": "two"}}',
    "offload.json": '{"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}',
    "stage.yaml": BASE + "deepspeed: stage.json",
    "offload.yaml": BASE + "deepspeed: offload.json",
}
ACCELERATE = ["plan", "--config", "stage.yaml", *GPU, "--accelerate_config"]
COMMANDS = {
    "a recipe that is not there": (["plan", "--config", "no.yaml"], "no.yaml cannot be read (No such file"),
    "a folder for a recipe": (["plan", "--config", "."], ". cannot be read (Is a directory)"),
    "a file that is not there": (["grade", "no.jsonl"], "no.jsonl cannot be read (No such file or directory)"),
    "a file whose name has two lines": (["grade", "a\nb"], "a\\nb cannot be read (No such file or directory)"),
    "text of a model that is nested deeply": (["grade", "deep.jsonl"], "deep.jsonl:1: row cannot be read (Recursion"),
    "a number of thousands of digits": (["grade", "digits.jsonl"], "digits.jsonl:1: row cannot be read ("),
    "a list for a format": (["grade", "format.jsonl"], "format.jsonl:1: format is ['a']: use one of"),
    "no time": (["grade", "good.jsonl", "--timeout", "nan"], "timeout=nan is out of range"),
    "a very long option": (["grade", "good.jsonl", "--format", "x" * 100_000], "is not known: use one of"),
    "half a results file": (["evaluate", "--compare", "half.json", "whole.json"], "half.json cannot be read (JSON"),
    "an accelerate config that is not there": ([*ACCELERATE, "no.yaml"], "accelerate_config='no.yaml' is not there"),
    "ZeRO's stage in words": (["plan", "--config", "stage.yaml", *GPU], "stage.json cannot be read (ValueError"),
    "a word for a mapping": (["plan", "--config", "offload.yaml", *GPU], "offload.json cannot be read (AttributeError"),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def refused(capsys, *arguments):
    """Return the one line of a command that is refused."""
    assert main([*arguments]) == 2
    out, err = capsys.readouterr()
    assert (err[:7], err.count("\n"), out) == ("error: ", 1, ""), err
    assert len(err) < 2500
    return err


@pytest.mark.parametrize("name", RECIPES)
def test_a_mistake_in_a_recipe_is_one_line(name, here):
    text, line = RECIPES[name]
    (here / "recipe.yaml").write_text(f"{BASE}{text}\n", encoding="utf-8")
    from grpo_math.settings.recipe import read
    from grpo_math.trainer.from_recipe import build

    with pytest.raises(UserError) as refused:
        build(read(["--config", "recipe.yaml"]))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistake_in_a_file_or_an_option_is_one_line(name, here, capsys):
    arguments, line = COMMANDS[name]
    assert line in refused(capsys, *arguments)


@pytest.mark.parametrize("arguments", [["plan", "token.yaml"], ["push", "run", "--token=hf_secret"]])
def test_the_line_of_a_mistake_shows_no_token(arguments, here, capsys):
    assert "secret" not in refused(capsys, *arguments)


def test_a_byte_order_mark_is_passed_over(here, capsys):
    for name in ("good.jsonl", "whole.json"):
        (here / name).write_bytes(b"\xef\xbb\xbf" + (here / name).read_bytes())
    (here / "mark.yaml").write_bytes(b"\xef\xbb\xbfseed: 1\n")
    assert main(["grade", "good.jsonl"]) == main(["evaluate", "--compare", "whole.json", "whole.json"]) == 0
    assert read_yaml("mark.yaml") == {"seed": 1}


def run(*arguments, **settings):
    command = [sys.executable, "-m", "grpo_math.cli", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, **settings)


def test_a_reader_that_has_gone_is_no_error(here):
    theirs, ours = os.pipe()
    os.close(theirs)
    done = run("train", "--list", stdout=ours)
    os.close(ours)
    assert (done.returncode, done.stderr) == (streams.CLOSED, "")


def test_an_ascii_terminal_gets_json_all_the_same(here):
    (here / "pi.jsonl").write_text('{"gold": "é", "prediction": "#### é"}', encoding="utf-8")
    done = run("grade", "pi.jsonl", "--json", stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert json.loads(done.stdout)["results"][0]["answer"] == "é"
