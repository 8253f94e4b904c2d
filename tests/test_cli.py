"""The command line: JSON on stdout, one line for bad input, exit codes 0, 1 and 2."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from grpo_math.cli import main, recipe


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


BAD = {
    "no such file": (["grade", "nowhere.jsonl"], "nowhere.jsonl"),
    "not JSON": (["grade", "{bad}"], "bad.jsonl:2:"),
    "no gold": (["grade", "{nogold}"], "nogold.jsonl:1: gold"),
    "an unknown answer format": (["grade", "{good}", "--format", "gsm8"], "did you mean 'gsm8k'"),
    "an unknown option": (["grade", "{good}", "--formt", "gsm8k"], "--formt"),
    "an unknown command": (["grad"], "invalid choice: 'grad'"),
    "no command": ([], "COMMAND"),
    "nothing to evaluate": (["evaluate", "--data", "generated"], "--model is missing"),
    "nothing to evaluate on": (["evaluate", "--model", "embedded"], "--data is missing"),
    "an unknown backend": (
        ["evaluate", "--model", "embedded", "--data", "generated", "--backend", "vlm"],
        "did you mean 'vllm'",
    ),
    "a server without its backend": (
        ["evaluate", "--model", "embedded", "--data", "generated", "--server", "http://127.0.0.1:1"],
        "server='http://127.0.0.1:1' would be ignored by backend=hf",
    ),
    "a model that is not there": (
        ["evaluate", "--model", "./nowhere", "--data", "generated"],
        "model='./nowhere' has no",
    ),
    "an adapter that is none": (
        ["evaluate", "--model", "embedded", "--adapter", "nowhere", "--data", "generated"],
        "adapter='nowhere' holds no adapter_config.json",
    ),
    "a training set that is none": (
        ["evaluate", "--model", "embedded", "--data", "generated", "--contamination", "gsm9k"],
        "did you mean 'gsm8k'",
    ),
    "samples without a temperature": (
        ["evaluate", "--model", "embedded", "--data", "generated", "--samples", "4"],
        "samples=4 cannot be drawn at temperature 0",
    ),
    "a comparison with nothing": (["evaluate", "--compare", "nowhere.json", "{good}"], "nowhere.json: cannot be read"),
    "a comparison with another option": (
        ["evaluate", "--compare", "a.json", "b.json", "--n", "4"],
        "--n would be ignored by --compare",
    ),
    "an evaluation of what is no run": (
        ["evaluate", "--run", "nowhere", "--data", "generated"],
        "run='nowhere' holds no config.yaml that names a model",
    ),
    "a run and a model": (
        ["evaluate", "--run", "x", "--model", "embedded", "--data", "generated"],
        "--model would be ignored by --run",
    ),
    "a run and an adapter": (
        ["evaluate", "--run", "x", "--adapter", "y", "--data", "generated"],
        "--adapter would be ignored by --run",
    ),
    "a run and nothing to evaluate on": (["evaluate", "--run", "x"], "--data is missing"),
    "a comparison and a run": (
        ["evaluate", "--compare", "a.json", "b.json", "--run", "x"],
        "--run would be ignored by --compare",
    ),
    "a run directory that is none": (["report", "nowhere"], "nowhere"),
    "a push of what is no run": (["push", "nowhere"], "run_dir='nowhere' is not a folder"),
    "a recipe that is none": (["train", "--config", "nowhere.yaml"], "nowhere.yaml"),
    "a setting that is none": (["train", "--output_dir", "x", "--learning_rat", "1"], "did you mean --learning_rate"),
    "a value that is not a number": (
        ["train", "--output_dir", "x", "--learning_rate", "fast"],
        "learning_rate='fast' is not a number",
    ),
    "an unknown baseline": (["train", "--output_dir", "x", "--baseline", "groupmean"], "did you mean 'group_mean'"),
    "an unknown surrogate": (["train", "--output_dir", "x", "--surrogate", "ppo"], "clip, reinforce"),
    "an unknown template": (["train", "--output_dir", "x", "--template", "gsm8"], "did you mean 'gsm8k'"),
    "an unknown reward": (
        ["train", "--output_dir", "x", "--model_name_or_path", "embedded", "--rewards", "accurcy"],
        "did you mean 'accuracy'",
    ),
    "no model": (["train", "--output_dir", "x", "--use_cpu", "true", "--bf16", "false"], "model_name_or_path"),
    "a group that does not divide the batch": (
        ["train", "--output_dir", "x", "--num_generations", "3"],
        "not a whole number of groups of 3: use 9, or gradient_accumulation_steps=3",
    ),
    "remote code": (["train", "--output_dir", "x", "--trust_remote_code", "true"], "trust_remote_code"),
    "a ratio setting without a ratio": (
        ["train", "--output_dir", "x", "--surrogate", "reinforce", "--epsilon", "0.1"],
        "epsilon=0.1 would be ignored",
    ),
    "a shape that is none": (["bench", "update", "--shapes", "gsm9k"], "did you mean 'gsm8k'"),
    "no run to measure": (["bench", "update", "--runs", "0"], "runs=0 measures nothing"),
    "nothing that is measured": (["bench", "grading"], "invalid choice: 'grading'"),
    "a model that is none": (["bench", "update", "--model", "./nowhere"], "--model ./nowhere"),
    "an unknown dataset": (["train", "--output_dir", "x", "--dataset", "gsm9k"], "did you mean 'gsm8k'"),
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


def test_help_of_every_command_is_there():
    listed = run("--help").stdout
    for command in ("demo", "train", "doctor", "evaluate", "grade", "report", "push", "bench"):
        assert command in listed
        assert run(command, "--help").returncode == 0


def test_the_shipped_recipe_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert recipe("demo_cpu.yaml").exists()


def test_another_run_in_one_directory_is_refused(tmp_path, capsys):
    (tmp_path / "history.jsonl").write_text('{"step": 1, "loss": 0.0}\n')
    (tmp_path / "config.yaml").write_text("stated: {seed: 7}\n")
    arguments = ["train", "--config", str(recipe("demo_cpu.yaml")), "--output_dir", str(tmp_path)]
    assert main(arguments) == 2
    assert "holds a run whose checkpoints do not fit these settings" in capsys.readouterr().err


def test_a_resume_without_a_checkpoint_is_refused(tmp_path, capsys):
    arguments = ["train", "--config", str(recipe("demo_cpu.yaml")), "--output_dir", str(tmp_path)]
    assert main([*arguments, "--resume_from_checkpoint", "true"]) == 2
    assert "finds no checkpoint" in capsys.readouterr().err


def test_the_demo_trains_a_step_and_reports(tiny, tmp_path, capsys):
    less = ["--model_name_or_path", tiny(), "--max_steps", "1", "--eval_n", "4", "--heldout_every", "0"]
    assert main(["demo", *less, "--output_dir", str(tmp_path / "run")]) == 0
    assert "95% paired interval" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"adapter", "after.json", "report.html"}
