"""The two files of exact versions fit the ranges of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FILES = ("constraints.txt", "constraints-vllm.txt")


def pins(file: str) -> dict[str, str]:
    results = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in results.items()}


@pytest.mark.parametrize("file", FILES)
def test_every_range_of_pyproject_holds_the_pinned_version(file):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = pins(file)
    named = project["dependencies"] + (project["optional-dependencies"]["vllm"] if "vllm" in file else [])
    for need in (*map(Requirement, named), *map(Requirement, project["optional-dependencies"]["deepspeed"])):
        assert need.specifier.contains(pinned[need.name.replace("_", "-")]), (need, pinned[need.name])
