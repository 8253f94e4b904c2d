"""The command line: JSON on stdout, help on one screen. Mistakes: test_bad_input.py."""

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from grpo_math import __version__
from grpo_math.cli import COMMANDS, command_parser, main, recipe_first
from grpo_math.settings.fields import TABLES
from grpo_math.system import streams
from grpo_math.system.machine import versions


def test_grade_prints_one_json_object_or_a_line_for_each_row(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"gold": "72", "prediction": "#### 72"}\n{"gold": "72", "prediction": "#### 73"}\n')
    assert main(["grade", str(path), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["verdicts"]["correct"] == 1
    assert main(["grade", str(path), "--jsonl"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["verdict"], row["answer"]) for row in rows] == [("correct", "72"), ("wrong", "73")]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_fits_on_one_screen(command):
    parser = command_parser(command)
    lines = parser.format_help().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert all(option.help for option in parser._actions)
    assert {COMMANDS[command].help, f"  {COMMANDS[command].examples[1]}"} <= set(lines)


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_without_a_command_the_commands_are_listed(arguments, capsys):
    with contextlib.suppress(SystemExit):
        assert main(arguments) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"\n  {command} " in text for command in COMMANDS)


def test_help_is_a_command_and_a_run_needs_no_option(capsys):
    for words in (["help"], ["help", "report"]):
        with pytest.raises(SystemExit):
            main(words)
    assert "usage: grpo-math report RUN_DIR" in capsys.readouterr().out
    parser = command_parser("evaluate")
    runs = [parser.parse_args(words).run for words in (["runs/a", "--data", "d"], ["--run", "runs/a"], ["--n", "5"])]
    assert runs == ["runs/a", "runs/a", None]


def test_what_deepspeed_prints_without_a_gpu_is_no_part_of_an_answer(capsys):
    streams.quiet()
    logger, handler = logging.getLogger("DeepSpeed"), logging.StreamHandler(sys.stdout)
    logger.addHandler(handler)
    logger.warning("Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.")
    logger.warning("another line")
    logger.removeHandler(handler)
    assert capsys.readouterr().out == "another line\n"


def test_a_command_on_a_full_disk_ends_with_one_line(monkeypatch, capsys):
    """`export` gets this exception from safetensors."""
    full = Exception("Error while serializing: I/O error: No space left on device (os error 28)")
    monkeypatch.setattr("grpo_math.commands.export.run", Mock(side_effect=full))
    assert main(["export", "runs/demo", "--merge", "merged"]) == 2
    line = (
        "error: a file could not be written (Error while serializing: I/O error: No space left on device (os error 28))"
    )
    assert capsys.readouterr().err == f"{line}: free space, then try again\n"


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("repo", {"report"}),
        ("train --learning_r", {"--learning_rate"}),
        ("evaluate --comp", {"--compare"}),
        ("train --method r", {"raft_pp", "reinforce_with_baseline", "reinforce_pp_baseline", "rloo"}),
        ("plan --config demo", {"demo_cpu"}),
        ("train demo_cpu --rewards accuracy form", {"format_soft", "format_strict"}),
        ("train --surrogate = gm", {"gmpo"}),  # bash's words of --surrogate=gm
        ("train --surrogate gmpo --meth", {"--method"}),
    ],
)
def test_a_shell_completes_commands_options_and_fields(typed, completed, completion):
    words = ["grpo-math", *typed.split()]
    call = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _grpo_math; echo ${{COMPREPLY[@]}}"
    output = subprocess.run(["bash", "-c", f"{completion}\n{call}"], capture_output=True, text=True, check=True).stdout
    assert set(output.split()) == completed


@pytest.fixture(scope="module")
def completion():
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(["--completion"]) == 0
    return output.getvalue()


def test_the_help_of_train_has_the_twenty_most_used_fields():
    text = command_parser("train").format_help()
    names = {name for meanings in TABLES["most_used"].values() for name in meanings}
    assert len(names) == 20
    assert all(f"  --{name} " in text for name in names)


@pytest.mark.parametrize(
    "words",
    [
        "plan --card 3060 demo_cpu --seed 3",
        "plan --seed 3 demo_cpu --card 3060",
        "train --gpus 1 demo_cpu",
        "train --use_peft launch/configs/demo_cpu.yaml",
        "train --use_peft true --weight_decay -1 demo_cpu",
        "train --rewards accuracy shaped demo_cpu --seed 3",
        "serve --check mine.yaml",
        "audit --tests gsm8k --prompt_tokens=64 rows.csv",
        "audit --dataset_limit 5 rows.csv",
        "doctor --gpus 1 --show 2 mine.yaml",
        "attack --method dapo format_strict",
    ],
)
def test_options_come_before_the_recipe_or_after_it(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").touch()
    name, *rest = words.split()
    recipe = next(word for word in rest if word in ("demo_cpu", "format_strict", "rows.csv") or word.endswith(".yaml"))
    others = [word for word in rest if word != recipe]
    assert recipe_first(command_parser(name), rest) == ["--config", recipe, *others]
    named = [*others, "--config", recipe]
    assert recipe_first(command_parser(name), named) == named


@pytest.mark.parametrize("words", [["demo_cpu"], ["--config", "demo_cpu"], ["launch/configs/demo_cpu.yaml"]])
def test_a_recipe_is_named_by_its_file_or_its_name_and_threads_of_a_cpu_do_not_spin(words, monkeypatch):
    trained = []
    monkeypatch.setattr(
        "grpo_math.train.program.main",
        lambda fields, recipe, *_: trained.append((recipe.settings.seed, os.environ["OMP_WAIT_POLICY"])) or 0,
    )
    monkeypatch.setattr("grpo_math.train.launcher.warning_lines", lambda *_: [])
    os.environ.pop("OMP_WAIT_POLICY", None)
    assert main(["train", *words, "--seed", "3"]) == 0
    assert trained == [(3, "PASSIVE")]


def test_the_command_and_a_run_say_the_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"grpo_math {__version__}\n"
    assert versions()["grpo_math"] == __version__
