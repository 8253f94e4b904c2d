"""Files, paths, variables and streams that are hostile: one line, exit code 2, no traceback, and no waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from grpo_math.cli import main
from grpo_math.reading import Unreadable, from_yaml
from grpo_math.run import streams
from grpo_math.run.history import settled

DEEP = "[" * 100_000
ALIASES = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
BASE = "model_name_or_path: embedded\ndataset: generated\n"
GPU = ("--gpus", "1", "--gpu_memory", "24")
ROW = {"id": "a", "problem": "1 + 1", "gold": "2", "completion": "#### 2", "category": "correct"}


def results(row=(), **fields):
    return json.dumps({"schema": 1, "template": "gsm8k", "rows": [{**ROW, **dict(row)}], **fields})


RECIPES = {
    "a date that there is not": ("seed: 2020-13-45", "seed='2020-13-45' is not a whole number"),
    "a date for a number": ("learning_rate: 2020-01-01", "learning_rate='2020-01-01' is not a number"),
    "a number that counts in sixties": ("seed: 1:30", "seed='1:30' is not a whole number"),
    "thousands of digits": (f"seed: {'9' * 5000}", "is not a whole number"),
    "a tag that does not fit": ("seed: !!int abc", "'abc' is no int that a setting can have, in line 3"),
    "a tag of Python's": ("seed: !!python/object/apply:os.system [id]", "could not determine a constructor"),
    "bytes": ("seed: !!binary aGk=", "is no binary that a setting can have"),
    "a character that there is not": ('seed: "\\UFFFFFFFF"', "is not YAML"),
    "a value that holds itself": ("seed: &a [*a]", "a value that holds itself, in line 3"),
    "lists in lists": (f"seed: {DEEP}", "more than 40 lists and mappings in each other"),
    "aliases of aliases": (ALIASES, "more than 50,000 values, with what aliases stand for"),
    "merged aliases": ("<<: &a {<<: *a}", "a value that holds itself"),
    "a novel": (f"template: {'x' * 600_000}", "500,000 are read at most"),
    "half of a surrogate pair": ('template: "\\ud800"', "template='\\ud800' is not UTF-8"),
    "half of one in a variable": ('env: {A: "\\ud800"}', "env: A is not a variable with a value"),
    "a user that there is not": ("output_dir: ~nouser/x", "output_dir='~nouser/x' is in the folder of a user"),
    "a link to itself": ("output_dir: loop/x", "output_dir='loop/x' goes through a link that leads to itself"),
    "JSON in JSON": (f"model_init_kwargs: '{DEEP}'", "is not a mapping"),
}
FILES = {
    "deep.json": DEEP,
    "whole.json": results(),
    "sample.json": results({"sample": [1]}),
    "gold.json": results({"gold": {}}),
    "versions.json": results(versions=[1]),
    "huge.json": results(samples=10**9),
    "deep.jsonl": f'{{"gold": "2", "prediction": {DEEP}',
    "format.jsonl": '{"gold": "2", "prediction": "2", "format": ["a"]}',
    "digits.jsonl": f'{{"gold": "2", "prediction": {"9" * 5000}}}',
    "good.jsonl": '{"gold": "2", "prediction": "#### 2"}\n',
    "stage.json": '{"zero_optimization": {"stage": "two"}}',
    "offload.json": '{"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}',
    "stage.yaml": BASE + "deepspeed: stage.json",
    "offload.yaml": BASE + "deepspeed: offload.json",
}
COMMANDS = {
    "deep JSON to grade": (["grade", "deep.jsonl"], "deep.jsonl:1: row is not JSON (it is nested too deeply)"),
    "a list for a format": (["grade", "format.jsonl"], "format.jsonl:1: format is ['a']: use one of"),
    "thousands of digits to grade": (["grade", "digits.jsonl"], "is not JSON (Exceeds the limit"),
    "no time": (["grade", "good.jsonl", "--timeout", "nan"], "timeout=nan is out of range"),
    "a pipe to grade": (["grade", "pipe"], "pipe:0: file is a pipe or a device"),
    "a device without an end": (["grade", "/dev/zero"], "is a pipe or a device"),
    "a file whose name has two lines": (["grade", "a\nb"], "a\\nb:0: file cannot be read (No such file or directory)"),
    "a pipe for a recipe": (["plan", "--config", "pipe"], "--config pipe: is a pipe or a device"),
    "a pipe for an accelerate config": (
        ["plan", "--config", "stage.yaml", "--accelerate_config", "pipe"],
        "accelerate_config='pipe' is not there",
    ),
    "deep JSON to compare": (["evaluate", "--compare", "deep.json", "whole.json"], "deep.json: is not JSON"),
    "a pipe to compare": (["evaluate", "--compare", "pipe", "whole.json"], "pipe: is a pipe or a device"),
    "a list for a sample": (["evaluate", "--compare", "sample.json", "whole.json"], "row 1 has a sample that is none"),
    "a mapping for a gold": (["evaluate", "--regrade", "gold.json"], "row 1 has a gold that is none"),
    "a list for a mapping": (["evaluate", "--regrade", "versions.json"], "versions is no such thing"),
    "a billion samples": (["evaluate", "--regrade", "huge.json"], "rows are not 1000000000 for each problem"),
    "ZeRO's stage in words": (
        ["plan", "--config", "stage.yaml", *GPU],
        "stage='two' in deepspeed='stage.json' cannot be",
    ),
    "a word for a mapping": (["plan", "--config", "offload.yaml", *GPU], "offload_optimizer='cpu' in deepspeed="),
    "a very long option": (["grade", "good.jsonl", "--format", "x" * 100_000], "is not known: use one of"),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def refused(capsys, *arguments):
    """The one line of a command that is refused."""
    assert main([*arguments]) == 2
    out, err = capsys.readouterr()
    assert (err[:7], err.count("\n"), out) == ("error: ", 1, ""), err
    assert len(err) < 2500
    return err


@pytest.mark.parametrize("name", RECIPES)
def test_a_hostile_recipe_is_refused_in_one_line(name, here, capsys):
    text, line = RECIPES[name]
    (here / "recipe.yaml").write_text(f"{BASE}{text}\n", encoding="utf-8")
    assert line in refused(capsys, "serve", "--check", "--config", "recipe.yaml")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_hostile_file_is_refused_in_one_line(name, here, capsys):
    arguments, line = COMMANDS[name]
    assert line in refused(capsys, *arguments)


@pytest.mark.parametrize(("name", "value"), [("GRPO_MATH_GRADE_MEMORY", "1e9"), ("LOCAL_WORLD_SIZE", "abc")])
def test_a_variable_that_is_no_number_is_refused(name, value, here, capsys, monkeypatch):
    monkeypatch.setenv(name, value)
    assert f"{name}={value!r} is not a whole number" in refused(capsys, "grade", "good.jsonl")


def test_a_byte_order_mark_is_passed_over(here, capsys):
    for name in ("good.jsonl", "whole.json"):
        (here / name).write_bytes(b"\xef\xbb\xbf" + (here / name).read_bytes())
    (here / "mark.yaml").write_bytes(b"\xef\xbb\xbfseed: 1\n")
    assert main(["grade", "good.jsonl"]) == main(["evaluate", "--compare", "whole.json", "whole.json"]) == 0
    assert from_yaml((here / "mark.yaml").read_bytes()) == {"seed": 1}


RUNS = {
    "config.yaml": (
        "a: &a [*a]",
        "seed: 2020-13-45",
        DEEP,
        ALIASES,
        "? [1]\n: 2",
        "rewards: 5\nmax_steps: [1]\nseed: x",
    ),
    "history.jsonl": (DEEP, '{"step": 1e308, "loss": 1}', '[1]\n{"step": 1, "reward": 1e308}\n', "x\n" * 1000),
    "before.json": (DEEP, results({"tokens": "x"}), results(samples=[1]), "\0"),
}


def test_a_damaged_run_has_its_page_with_a_note_or_without(here, capsys):
    """Of any file in any state: a run that is damaged is still to be looked at."""
    for name, texts in RUNS.items():
        for number, text in enumerate(texts):
            run = here / f"{name}.{number}"
            run.mkdir()
            (run / "history.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.4}\n')
            (run / name).write_text(text)
            assert main(["report", str(run)]) == 0, (name, text[:40])
            assert (run / "report.html").exists()
            assert len(capsys.readouterr().err) < 6000


def test_a_file_where_the_plots_belong_is_one_line(here, capsys):
    (here / "history.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    (here / "plots").write_text("")
    assert "plots" in refused(capsys, "report", ".")


def test_text_of_megabytes_is_cut_on_the_page(here, capsys):
    (here / "before.json").write_text(results({"completion": "x" * 3_000_000}))
    assert main(["report", "."]) == 0
    page = (here / "report.html").read_text(encoding="utf-8")
    assert len(page) < 500_000
    assert "(2,900,000 characters more are in the file)" in page


def test_a_history_is_put_in_order_without_looking_at_each_line_anew(monkeypatch):
    lines = [{"step": step, "reward": 0.5} for step in range(1, 30_001)]
    again = [{"step": step, "reward": 0.25} for step in (29_999, 30_000) * 10_000]
    assert [line["step"] for line in settled([*lines, *again])] == list(range(1, 30_001))


def run(*arguments, **settings):
    command = [sys.executable, "-m", "grpo_math.cli", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, **settings)


def test_a_full_device_is_one_line(here):
    with open("/dev/full", "w") as full:
        done = run("grade", "good.jsonl", "--json", stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("error: stdout, or a file, cannot be written (No space left on device)")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_has_gone_is_no_error(here):
    theirs, ours = os.pipe()
    os.close(theirs)
    done = run("recipes", stdout=ours)
    os.close(ours)
    assert (done.returncode, done.stderr) == (streams.CLOSED, "")


def test_an_ascii_terminal_gets_json_all_the_same(here):
    (here / "pi.jsonl").write_text('{"gold": "é", "prediction": "#### é"}', encoding="utf-8")
    done = run("grade", "pi.jsonl", "--json", stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert json.loads(done.stdout)["results"][0]["answer"] == "é"


def test_aliases_that_are_few_stay():
    assert from_yaml("a: &a [1]\nb: *a") == {"a": [1], "b": [1]}
    with pytest.raises(Unreadable, match="'a' is given twice"):
        from_yaml("a: 1\na: 2", strict=True)
