""".ci/run tries the lowest versions of pyproject.toml and the newest ones that were tested, and constraints.txt."""

import re
import tomllib

import pytest
from launching import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

from grpo_math.trainer.contract import NEWEST, minor, stored

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIRED = {
    required.name: required.specifier
    for required in map(
        Requirement, (*PROJECT["dependencies"], *EXTRAS["demo"], *EXTRAS["deepspeed"], *EXTRAS["quant"])
    )
}
NOT_MOVED = {"deepspeed", "torch", "trl"}  # constraints-lowest.txt has the reasons


def pins(file: str) -> dict[str, Version]:
    lines = re.findall(r"^([^#\s=]+)==(\S+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return {name.lower(): Version(version) for name, version in lines}


def test_each_minimum_is_the_version_of_constraints_lowest():
    lowest = pins("constraints-lowest.txt")
    assert set(lowest) == set(REQUIRED) - NOT_MOVED
    for name, version in lowest.items():
        [minimum] = [Version(bound.version) for bound in REQUIRED[name] if bound.operator == ">="]
        assert version == minimum, name


def test_the_newest_versions_are_those_that_doctor_takes_for_tested():
    newest = pins("constraints-newest.txt")
    assert set(newest) == set(REQUIRED) - NOT_MOVED
    assert all(version in REQUIRED[name] for name, version in newest.items())
    tested = {name: [*tables][-1] for name, tables in stored().items()} | NEWEST
    assert {name: tested[name] for name in tested if name in newest} == {
        name: minor(str(version)) for name, version in newest.items() if name in tested
    }


def test_no_upper_bound_is_below_the_next_major_version():
    for name, bounds in REQUIRED.items():
        majors = [Version(bound.version).release[1:] for bound in bounds if bound.operator == "<"]
        assert not any(map(any, majors)), name


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-vllm.txt"])
def test_the_exact_versions_are_supported(file):
    exact = pins(file)
    assert not [name for name in REQUIRED if name in exact and exact[name] not in REQUIRED[name]]
