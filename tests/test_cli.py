"""The command line: JSON on stdout, one line for bad input, exit codes 0, 1 and 2."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from grpo_math.cli import COMMANDS, main, parser_of
from grpo_math.settings.fields import fields
from grpo_math.settings.groups import MOST_USED
from grpo_math.settings.recipe import read


def run(*arguments: str, cwd=None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "grpo_math.cli", *map(str, arguments)], capture_output=True, text=True, cwd=cwd
    )


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_grade_prints_one_json_object_in_row_order(tmp_path, capsys):
    rows = [
        {"gold": "72", "prediction": "#### 72"},
        {"gold": "72", "prediction": "#### 73"},
        {"gold": "1/2", "prediction": "The answer is 0.5."},
        {"gold": "72", "prediction": "I cannot tell you what it is, sorry."},
    ]
    assert main(["grade", str(write_rows(tmp_path / "rows.jsonl", rows)), "--json"]) == 0
    out = capsys.readouterr().out
    answer = json.loads(out)
    assert out.count("\n") == 1
    assert answer["rows"] == 4
    assert [r["verdict"] for r in answer["results"]] == ["correct", "wrong", "correct", "no_answer"]
    assert answer["verdicts"]["correct"] == 2
    assert all(r["seconds"] >= 0 for r in answer["results"])

    assert main(["grade", str(tmp_path / "rows.jsonl"), "--jsonl"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["verdict"] for line in lines] == ["correct", "wrong", "correct", "no_answer"]
    assert [line["answer"] for line in lines] == [result["answer"] for result in answer["results"]]
    assert all(line.keys() == {"verdict", "answer", "seconds"} for line in lines)


BAD = {
    "JSON in two ways": (["grade", "{good}", "--json", "--jsonl"], "--json would be ignored by --jsonl"),
    "not JSON": (["grade", "{bad}"], "bad.jsonl:2:"),
    "no gold": (["grade", "{nogold}"], "nogold.jsonl:1: gold"),
    "an unknown answer format": (["grade", "{good}", "--format", "gsm8"], "did you mean 'gsm8k'"),
    "an unknown option": (["grade", "{good}", "--formt", "gsm8k"], "--formt"),
    "an unknown command": (["trian"], "did you mean 'train'?"),
    "nothing to evaluate": (["evaluate", "--data", "generated"], "--model is missing"),
    "a model that is not there": (
        ["evaluate", "--model", "./nowhere", "--data", "generated"],
        "model='./nowhere' is not a folder",
    ),
    "an evaluation of what is no run": (
        ["evaluate", "--run", "nowhere", "--data", "generated"],
        "run='nowhere' holds no config.yaml that names a model",
    ),
    "a run and a model": (
        ["evaluate", "--run", "x", "--model", "embedded", "--data", "generated"],
        "--model would be ignored by --run",
    ),
    "a run directory that is none": (["report", "nowhere"], "nowhere"),
    "a push of what is no run": (["push", "nowhere"], "run_dir='nowhere' is not a run that has finished"),
    "a recipe whose name is misspelt": (
        ["train", "demo_cp"],
        "config='demo_cp' is not known: did you mean 'demo_cpu'?",
    ),
    "a file whose name is misspelt": (["grade", "goood.jsonl"], "did you mean good.jsonl?"),
    **{
        f"another program's name: {output}": (["train", "--output_dir", "x", output, "1"], f"did you mean --{meant}?")
        for output, meant in {"--model": "model_name_or_path", "--lr": "learning_rate", "--lora-rank": "lora_r"}.items()
    },
    "an option by the name of a setting": (["evaluate", "--model_name_or_path", "x"], "did you mean --model?"),
    "a server of a recipe without one": (
        ["serve", "--config", "launch/configs/demo_cpu.yaml"],
        "this recipe has no server to start: set use_vllm: true and vllm_mode: server",
    ),
    "an accelerate config that is none": (
        ["plan", "--config", "launch/configs/gsm8k_8gb.yaml", "--accelerate-config", "zero9"],
        "accelerate_config='zero9' is not there: give a file, or a name such as zero2",
    ),
    "an unknown baseline": (["train", "--output_dir", "x", "--baseline", "groupmean"], "did you mean 'group_mean'"),
    "an unknown surrogate": (["train", "--output_dir", "x", "--surrogate", "ppo"], "clip, reinforce"),
    "no model": (["train", "--output_dir", "x", "--use_cpu", "true", "--bf16", "false"], "model_name_or_path"),
    "remote code": (["train", "--output_dir", "x", "--trust_remote_code", "true"], "trust_remote_code"),
    "a ratio setting without a ratio": (
        ["train", "--output_dir", "x", "--surrogate", "reinforce", "--loss_type", "cispo"],
        "loss_type='cispo' is a weight of the ratio",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    good = {"gold": "1", "prediction": "1"}
    files = {
        "good": write_rows(tmp_path / "good.jsonl", [good]),
        "nogold": write_rows(tmp_path / "nogold.jsonl", [{"prediction": "1"}]),
        "bad": tmp_path / "bad.jsonl",
    }
    files["bad"].write_text(json.dumps(good) + "\n{half", encoding="utf-8")
    arguments, message = BAD[case]
    assert main([a.format(**files) if a.startswith("{") else a for a in arguments]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in err
    assert out == ""
    assert not (tmp_path / "x").exists(), "a refused run must leave nothing behind"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_is_a_sentence_its_options_and_two_examples_on_one_screen(command):
    parser = parser_of(command)
    lines = parser.format_help().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert COMMANDS[command].help in lines
    assert all(option.help for option in parser._actions)
    examples = lines[lines.index("examples:") + 1 :]
    assert len(examples) == 2
    for example in examples:
        _, name, *words = shlex.split(example)
        assert name == command
        if COMMANDS[command].fields and words and not words[0].startswith("-"):
            words = ["--config", *words]
        fields = parser.parse_known_args(words)[1]
        assert COMMANDS[command].fields or not fields
        if "my_recipe.yaml" not in words:
            assert read(fields).problems == []


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_without_a_command_the_commands_are_listed(arguments, capsys):
    with contextlib.suppress(SystemExit):
        assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(COMMANDS) <= 11
    assert max(map(len, lines)) <= 80
    for command in COMMANDS:
        assert any(line.startswith(f"  {command} ") for line in lines)


def test_the_help_of_train_has_the_twenty_most_used_fields_and_help_all_has_every_field(capsys):
    text = parser_of("train").format_help()
    names = [name for meanings in MOST_USED.values() for name in meanings]
    assert len(names) == 20
    assert set(names) <= fields().keys()
    assert all(f"  --{name} " in text for name in names)
    assert "docs/settings.md" in text
    assert main(["train", "--help-all"]) == 0
    assert "--vllm_importance_sampling_mode" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["demo_cpu"], ["--config", "demo_cpu"], ["launch/configs/demo_cpu.yaml"]])
def test_a_recipe_is_named_by_its_file_or_by_its_name(words, capsys, monkeypatch):
    given = []
    monkeypatch.setattr("grpo_math.train.here.train", lambda fields, recipe: given.append(recipe) or 0)
    assert main(["train", *words, "--seed", "3"]) == 0
    (recipe,) = given
    assert (recipe.values["model_name_or_path"], recipe.values["seed"]) == ("embedded", 3)


@pytest.mark.parametrize("command", [["ask", "runs/dmo", "1 + 1"], ["evaluate", "--model", "runs/dmo", "--data", "x"]])
def test_a_folder_that_is_misspelt_gets_its_neighbour_and_the_hub_is_not_asked(command, tmp_path, capsys, monkeypatch):
    (tmp_path / "runs/demo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.getaddrinfo", None)
    assert main(command) == 2
    assert "='runs/dmo' is not a folder: did you mean runs/demo?" in capsys.readouterr().err


def test_options_are_spelt_with_dashes_or_underscores_and_plan_takes_settings(capsys):
    asked = ["plan", "--config", "launch/configs/gsm8k_8gb.yaml", "--gpus", "1", "--json"]
    peaks = []
    for more in (
        ["--gpu-memory", "8", "--cpu-memory=16", "--accelerate-config", "accelerate_configs/zero2_offload.yaml"],
        ["--gpu_memory", "8", "--cpu_memory=16", "--accelerate_config", "zero2_offload"],
        ["--gpu_memory", "8", "--cpu_memory=16", "--accelerate_config", "zero2_offload", "--lora-r", "64"],
    ):
        main([*asked, *more])
        peaks.append(json.loads(capsys.readouterr().out)["peak_gb"])
    assert peaks[0] == peaks[1] < peaks[2]


def test_deepspeed_that_is_not_installed_is_one_line(tmp_path, capsys, monkeypatch):
    from grpo_math.train import layout

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(layout, "_installed", lambda package: False)
    asked = ["train", "--config", "launch/configs/demo_cpu.yaml", "--output_dir", "x", "--accelerate_config", "zero2"]
    assert main(asked) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: accelerate_config='zero2' needs DeepSpeed, which is not installed: install it")
    assert not (tmp_path / "x").exists()


def test_the_demo_trains_a_step_and_reports(tiny, tmp_path, capsys):
    less = ["--model_name_or_path", tiny(), "--max_steps", "1", "--eval_n", "4", "--heldout_every", "0"]
    assert main(["demo", *less, "--output_dir", str(tmp_path / "run")]) == 0
    out, err = capsys.readouterr()
    assert "95% paired interval" in out
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"adapter", "after.json", "report.html"}
    stages = [line for line in err.splitlines() if re.match(r"\d of 3: ", line)]
    assert stages == ["1 of 3: evaluating before training", "2 of 3: training", "3 of 3: evaluating after training"]
    assert main(["demo", *less, "--output_dir", str(tmp_path / "run")]) == 0
    assert f"The earlier run is kept in {tmp_path / 'run.1'}." in capsys.readouterr().err
    assert (tmp_path / "run.1/finished.json").exists()
    assert (tmp_path / "run/finished.json").exists()


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_do_not_spin_where_a_cpu_trains_unless_the_user_said_so(given, expected, monkeypatch):
    policies = []
    monkeypatch.setattr("grpo_math.train.program.main", lambda *_: policies.append(os.environ["OMP_WAIT_POLICY"]) or 0)
    monkeypatch.setattr("grpo_math.checks.preflight.refuse_early", lambda recipe: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    assert main(["train", "demo_cpu"]) == 0
    assert policies == [expected]
