"""The version has one place, `grpo_math.__version__`; pyproject.toml and CHANGELOG.md agree with it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

from grpo_math import __version__
from grpo_math.cli import main
from grpo_math.run.machine import versions

ROOT = Path(__file__).parents[1]


def test_pyproject_reads_the_version_of_the_package():
    file = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in file["project"]
    assert file["project"]["dynamic"] == ["version"]
    assert file["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "grpo_math.__version__"}


def test_the_changelog_begins_with_it():
    (first, note), *_ = re.findall(r"^## (\S+)(.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert first == __version__
    assert Version(first).is_devrelease == (note == " (unreleased)")


def test_the_command_and_a_run_say_it(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"grpo_math {__version__}\n"
    assert versions()["grpo_math"] == __version__
