"""The two files of exact versions fit the ranges of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-vllm.txt"])
def test_every_range_of_pyproject_holds_the_pinned_version(file):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    extras = project["optional-dependencies"]
    named = project["dependencies"] + extras["deepspeed"] + (extras["vllm"] if "vllm" in file else [])
    for need in map(Requirement, named):
        assert need.specifier.contains(pinned[canonicalize_name(need.name)]), need
