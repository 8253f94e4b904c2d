"""The version has one place, `grpo_math.__version__`, which pyproject.toml reads; CHANGELOG.md begins with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.version import Version

from grpo_math import __version__
from grpo_math.cli import main
from grpo_math.run.machine import versions

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def test_the_changelog_begins_with_it():
    first, note = re.search(r"^## (\S+)(.*)$", CHANGELOG.read_text(encoding="utf-8"), re.MULTILINE).groups()
    assert first == __version__
    assert Version(first).is_devrelease == (note == " (unreleased)")


def test_the_command_and_a_run_say_it(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"grpo_math {__version__}\n"
    assert versions()["grpo_math"] == __version__
