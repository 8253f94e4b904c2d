"""The bounds of pyproject.toml are the two ends that .ci/run tries, and constraints.txt lies between them."""

import re
import tomllib

import pytest
from launching import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIRED = {
    required.name: required.specifier
    for required in map(
        Requirement, (*PROJECT["dependencies"], *EXTRAS["demo"], *EXTRAS["deepspeed"], *EXTRAS["quant"])
    )
}
# Their names and private methods are used.
BOUNDED = ("accelerate", "datasets", "huggingface_hub", "peft", "transformers")
NOT_MOVED = {"deepspeed", "torch", "trl"}  # constraints-lowest.txt has the reasons; TRL is pinned


def pins(file: str) -> dict[str, Version]:
    lines = re.findall(r"^([^#\s=]+)==(\S+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return {name.lower(): Version(version) for name, version in lines}


def test_each_minimum_is_the_version_of_constraints_lowest():
    lowest = pins("constraints-lowest.txt")
    assert set(lowest) == set(REQUIRED) - NOT_MOVED
    for name, version in lowest.items():
        [minimum] = [Version(bound.version) for bound in REQUIRED[name] if bound.operator == ">="]
        assert version == minimum, name


def test_each_upper_bound_is_the_next_minor_version_of_constraints_newest():
    newest = pins("constraints-newest.txt")
    assert set(newest) == set(REQUIRED) - NOT_MOVED
    assert all(version in REQUIRED[name] for name, version in newest.items())
    for name in BOUNDED:
        major, minor = newest[name].release[:2]
        [bound] = [bound.version for bound in REQUIRED[name] if bound.operator == "<"]
        assert bound == f"{major}.{minor + 1}", name


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-vllm.txt"])
def test_the_exact_versions_are_supported(file):
    exact = pins(file)
    assert not [name for name in REQUIRED if name in exact and exact[name] not in REQUIRED[name]]
