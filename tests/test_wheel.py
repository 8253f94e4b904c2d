"""The source archive is complete; the wheel built from it works in a fresh environment and another folder."""

import json
import shutil
import subprocess
import sys
import tarfile
import venv
from importlib.metadata import version
from pathlib import Path

import pytest
from launching import ROOT, run

import grpo_math

PIP = [sys.executable, "-m", "pip", "--python"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with a copy of the checkout, the source archive, and the wheel that was built from the archive.

    The copy has the files that git tracks: a user's own files may lie next to them.
    """
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if not listed.stdout:
        pytest.skip("not a git checkout")
    # setuptools writes into the folder that it builds from: not where another run of the tests may build too.
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    for path in filter(Path.exists, map(ROOT.joinpath, listed.stdout.split("\0")[:-1])):
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(build, check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    return next(built.glob("grpo_math-*.whl"))


def environment(folder, wheel):
    """Return the Python of a fresh environment in which only the wheel is installed."""
    venv.create(folder)
    python = folder / "bin/python"
    subprocess.run([*PIP, str(python), "install", "--quiet", "--no-deps", str(wheel)], check=True)
    return python


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The Python of an environment that has the wheel, and what this one has beside it."""
    python = environment(tmp_path_factory.mktemp("whole") / "env", wheel)
    # The dependencies are those of the environment that runs the tests: their gigabyte is not installed twice.
    site = next(python.parents[1].glob("lib/python*/site-packages"))
    here = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    (site / "dependencies.pth").write_text(f"{here}\n")
    return python


def command(python, *words, cwd):
    return run([str(python), "-I", "-m", "grpo_math.cli", *words], cwd=cwd)


@pytest.mark.full
def test_the_grader_alone_needs_math_verify_and_no_other_package(wheel, tmp_path):
    python = environment(tmp_path / "env", wheel)
    needs = f"math-verify=={version('math-verify')}"
    done = subprocess.run([*PIP, str(python), "install", "--quiet", needs], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"math-verify cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    # The last row needs a worker.
    rows = [("72", "#### 72"), ("72", "#### 73"), ("x^2+2x+1", r"\boxed{(x+1)^2}")]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"gold": g, "prediction": p}) for g, p in rows))
    grade = [python.with_name("grpo-math"), "grade", "rows.jsonl", "--jsonl"]
    lines = subprocess.check_output(grade, text=True, cwd=tmp_path).splitlines()
    assert [json.loads(line)["verdict"] for line in lines] == ["correct", "wrong", "correct"]
    program = (
        "from importlib.util import find_spec\n"
        "from grpo_math import Verdict, grade\n"
        "assert grade('72', '#### 72') is Verdict.CORRECT\n"
        "assert not [name for name in ('torch', 'trl', 'yaml', 'tqdm') if find_spec(name)]"
    )
    subprocess.run([python, "-I", "-c", program], check=True, cwd=tmp_path)


def test_the_source_archive_has_every_file_of_the_checkout(built):
    with tarfile.open(next(built.glob("grpo_math-*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = {path.relative_to(built / "source").as_posix() for path in (built / "source").rglob("*") if path.is_file()}
    assert "launch/quickstart.sh" in files
    assert not [name for name in files - names if "egg-info" not in name]


def test_every_file_of_the_package_and_every_config_is_in_it(built, installed):
    folders = {"": "grpo_math", "launch_configs": "launch/configs"}
    folders |= {"accelerate_configs": "accelerate_configs", "deepspeed_configs": "deepspeed"}
    (package,) = installed.parents[1].glob("lib/python*/site-packages/grpo_math")
    for folder_in_package, here in folders.items():
        source = built / "source" / here
        files = {path.relative_to(source) for path in source.rglob("*.*")}
        assert files
        assert not {path for path in files if not (package / folder_in_package / path).exists()}
    assert [path.name for path in package.parent.glob("grpo_math-*")] == [
        f"grpo_math-{grpo_math.__version__}.dist-info"
    ]


def test_shipped_files_are_copied_there_and_go_by_their_names_of_the_checkout(installed, tmp_path):
    recipe, config = "launch/configs/gsm8k_8gb.yaml", "accelerate_configs/zero2_offload.yaml"
    options = ("--gpus", "1", "--gpu-memory", "8", "--cpu-memory", "64", "--json", "--accelerate-config", config)
    plan = json.loads(command(installed, "plan", "--config", recipe, *options, cwd=tmp_path))
    assert "optimizer_state" in plan["main_memory"]  # the DeepSpeed file that config names was read
    command(installed, "train", "--copy", "demo_cpu", cwd=tmp_path)
    assert (tmp_path / "demo_cpu.yaml").read_bytes() == (ROOT / "launch/configs/demo_cpu.yaml").read_bytes()
