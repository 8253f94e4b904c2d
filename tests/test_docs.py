"""The README says what is there: the tree, every command, every field, every reward, every file it links."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from grpo_math.checks import table
from grpo_math.problems.prompts import TEMPLATES
from grpo_math.rewards import REWARDS
from grpo_math.settings.arguments import TrainArguments
from grpo_math.trainer.config import TRL_EQUAL

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tree_names_every_module_and_no_other():
    tree = re.search(r"```text\n(grpo_math/.*?)```", README, re.DOTALL)
    assert tree, "the README has no tree"
    named = set(re.findall(r"^ {2}(\w+(?:\.py|/))", tree[1], re.MULTILINE))
    package = ROOT / "grpo_math"
    there = {path.name for path in package.glob("*.py")}
    there |= {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert named == there


@pytest.mark.parametrize(
    "command", ["demo", "train", "serve", "doctor", "evaluate", "grade", "report", "push", "plan", "bench"]
)
def test_every_command_is_shown(command):
    assert f"grpo-math {command}" in README


@pytest.mark.parametrize("name", [*TRL_EQUAL, *(f.name for f in fields(TrainArguments))])
def test_every_field_is_described(name):
    assert f"`{name}`" in README


@pytest.mark.parametrize("name", [*REWARDS, *TEMPLATES])
def test_every_reward_and_template_is_named(name):
    assert f"`{name}`" in README


def test_the_troubleshooting_tables_are_what_the_command_prints():
    for part in (table.before(), table.during()):
        assert f"\n\n{table.markdown(part)}\n\n" in README, "run grpo-math doctor --table"


def test_what_doctor_is_said_to_say_it_says():
    """tests/test_doctor.py holds that it gives these lines for these settings."""
    cases = yaml.safe_load((ROOT / "tests/cases/bad_configs.yaml").read_text(encoding="utf-8"))
    lines = [re.fullmatch(r"\w+: (.*)\. Remedy: (.*) \((\w+)\)", case["says"]) for case in cases]
    rows = re.search(r"\| doctor says \|.*\n\| ---.*\n((?:\|.*\n)+)", README)
    assert rows, "the README has no such table"
    for row in rows[1].splitlines():
        assert any(row == f"| `{line[1]}` | {line[2]} | `{line[3]}` |" for line in lines if line), row


def test_the_table_of_what_fits_8_gb_is_what_the_plan_says():
    program = ROOT / "tests" / "benchmarks" / "plan_8gb.py"
    printed = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True, cwd=ROOT)
    assert printed.stdout.strip() in README


def test_the_table_of_layouts_is_what_the_command_prints():
    from grpo_math.planner import table as layouts

    assert f"\n\n{layouts()}\n\n" in README, "run grpo-math plan --table"


def test_every_script_that_is_named_can_be_run():
    for script in re.findall(r"\./(launch/\w+\.sh)", README):
        path = ROOT / script
        assert path.stat().st_mode & 0o111, script


def test_no_path_of_one_machine_and_no_python_file_in_deepspeed():
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        assert not re.match(r"deepspeed/.*\.py$", name)
        if name.endswith((".py", ".sh", ".yaml", ".toml", ".md", ".txt")):
            text = (ROOT / name).read_text(encoding="utf-8")
            assert not re.search(r"(?<![\w.])/(home|root|work)/\w", text), name
