"""The two files of exact versions: each fits the ranges of pyproject.toml, and pip finds a solution with each."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
EXTRAS = {"constraints.txt": "dev", "constraints-vllm.txt": "vllm,dev"}


def pins(file: str) -> dict[str, str]:
    found = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found.items()}


@pytest.mark.parametrize("file", EXTRAS)
def test_every_range_of_pyproject_holds_the_pinned_version(file):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = pins(file)
    named = project["dependencies"] + (project["optional-dependencies"]["vllm"] if "vllm" in file else [])
    for need in (*map(Requirement, named), *map(Requirement, project["optional-dependencies"]["deepspeed"])):
        assert need.specifier.contains(pinned[need.name.replace("_", "-")]), (need, pinned[need.name])


def pip(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.full
@pytest.mark.parametrize("file", EXTRAS)
def test_pip_finds_a_solution(file):
    if pip("--no-deps", "-c", file, "trl").returncode:
        pytest.skip("pip reaches no package index")
    done = pip("-c", file, f".[{EXTRAS[file]}]")
    assert done.returncode == 0, done.stderr[-2000:]
