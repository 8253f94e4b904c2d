""".ci/run tries the lowest versions of pyproject.toml and the newest ones that were tested, and constraints.txt.

Here uv resolves each documented installation as on a machine with a GPU. It installs nothing.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from launching import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from grpo_math.trainer.contract import minor, newest, stored

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIRED = {
    canonicalize_name(required.name): required.specifier
    for required in map(
        Requirement, (*PROJECT["dependencies"], *EXTRAS["demo"], *EXTRAS["deepspeed"], *EXTRAS["quant"])
    )
}
NOT_MOVED = {"deepspeed", "torch", "trl"}  # .ci/constraints-lowest.txt has the reasons


def pins(file: str) -> dict[str, Version]:
    lines = re.findall(r"^([^#\s=]+)==(\S+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return {canonicalize_name(name): Version(version) for name, version in lines}


def test_each_minimum_is_the_version_of_constraints_lowest():
    lowest = pins(".ci/constraints-lowest.txt")
    assert set(lowest) == set(REQUIRED) - NOT_MOVED
    for name, version in lowest.items():
        [minimum] = [Version(bound.version) for bound in REQUIRED[name] if bound.operator == ">="]
        assert version == minimum, name


def test_the_newest_versions_are_those_that_doctor_takes_for_tested():
    moved = pins(".ci/constraints-newest.txt")
    assert set(moved) == set(REQUIRED) - NOT_MOVED
    assert all(version in REQUIRED[name] for name, version in moved.items())
    expected = pins("constraints-vllm.txt") | moved
    for package, tables in stored().items():
        assert [*tables][-1] == str(expected[canonicalize_name(package)]), package
    for package, version in newest().items():
        assert version == minor(str(expected[canonicalize_name(package)])), package


def test_no_upper_bound_is_below_the_next_major_version():
    for name, bounds in REQUIRED.items():
        majors = [Version(bound.version).release[1:] for bound in bounds if bound.operator == "<"]
        assert not any(map(any, majors)), name


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-vllm.txt"])
def test_the_exact_versions_are_supported(file):
    exact = pins(file)
    assert not [name for name in REQUIRED if name in exact and exact[name] not in REQUIRED[name]]


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-vllm.txt"])
def test_the_exact_versions_leave_the_build_of_torch_open(file):
    """A file from an environment with torch's CPU build once held pins that CUDA's build excludes."""
    assert not [name for name in pins(file) if name.startswith(("cuda", "nvidia", "triton"))]


# The extras that go with each file: a solution of all of them is one of each line that names some. `gym` is documented
# without constraints.
INSTALLATIONS = {"constraints.txt": {*EXTRAS} - {"vllm", "gym"}, "constraints-vllm.txt": {*EXTRAS} - {"gym"}}


def test_each_documented_line_names_the_constraints_that_fit_its_extras():
    pages = [
        page for glob in ("*.md", "docs/*.md", "launch/configs/*", "grpo_math/**/*.py") for page in ROOT.glob(glob)
    ]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    lines = [line for line in re.findall(r"pip install .*", text) if "-c constraints" in line]
    assert len(lines) > 5
    for line in lines:
        [file] = re.findall(r"-c (\S+\.txt)", line)
        extras = {extra for names in re.findall(r"\.\[([\w,-]+)\]", line) for extra in names.split(",")}
        assert extras <= INSTALLATIONS[file], line
        assert ("vllm" in extras) == (file == "constraints-vllm.txt"), line


def solve(*words: str) -> subprocess.CompletedProcess[str]:
    """The answer of uv, which solves for other machines than this one."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [shutil.which("uv", path=path) or "uv", "pip", "compile", "--quiet", "--no-python-downloads", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope="module")
def uv():
    try:
        if error := solve(".ci/constraints-lowest.txt", "--no-deps").stderr:
            pytest.skip(f"uv finds no package index: {error.strip().splitlines()[-1]}")
    except FileNotFoundError:
        pytest.skip("uv is not installed")


@pytest.mark.full
@pytest.mark.usefixtures("uv")
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("file", INSTALLATIONS)
def test_each_documented_installation_has_a_solution_with_torchs_cuda_build(file, machine, python):
    extras = [f"--extra={extra}" for extra in sorted(INSTALLATIONS[file])]
    target = [f"--python-platform={machine}-manylinux_2_34", f"--python-version={python}"]
    done = solve("pyproject.toml", "-c", file, *extras, *target)
    assert done.returncode == 0, done.stderr
    assert "nvidia-nccl" in done.stdout
