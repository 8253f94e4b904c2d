"""The built wheel, installed in a fresh environment, works from another folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

import grpo_math

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # setuptools writes into the folder that it builds from: not where another run of the tests may build too.
    source = folder / "source"
    for name in ("grpo_math", "accelerate_configs", "deepspeed", "launch"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("grpo_math-*.whl"))


def pip_install(python, *arguments):
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The Python of an environment that has the wheel, and what this one has beside it."""
    folder = tmp_path_factory.mktemp("whole")
    venv.create(folder / "env")
    python = folder / "env/bin/python"
    assert pip_install(python, "--no-deps", wheel).returncode == 0
    # The dependencies are those of the environment that runs the tests: their gigabyte is not installed twice.
    site = next((folder / "env/lib").glob("python*/site-packages"))
    here = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    (site / "dependencies.pth").write_text(f"{here}\n")
    return python


def run(python, *arguments, cwd):
    command = [str(python), "-I", "-m", "grpo_math.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_the_wheel_answers_and_not_the_checkout_and_has_its_version(installed, tmp_path):
    program = (
        "from importlib.metadata import version; import grpo_math; print(version('grpo_math'), grpo_math.__file__)"
    )
    done = subprocess.run([installed, "-I", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    installed_version, path = done.stdout.split()
    assert installed_version == grpo_math.__version__
    assert "site-packages" in path
    assert str(ROOT / "grpo_math") not in path


def test_grade_works_there_and_so_do_its_workers(installed, tmp_path):
    rows = [{"gold": "72", "prediction": "#### 72"}, {"gold": "x^2+2x+1", "prediction": r"\boxed{(x+1)^2}"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = run(installed, "grade", "rows.jsonl", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [r["verdict"] for r in json.loads(done.stdout)["results"]] == ["correct", "correct"]


@pytest.mark.full
def test_the_grader_alone_needs_math_verify_and_no_other_package(wheel, tmp_path):
    venv.create(tmp_path / "env")
    python = tmp_path / "env/bin/python"
    assert pip_install(python, "--no-deps", wheel).returncode == 0
    done = pip_install(python, f"math-verify=={version('math-verify')}")
    if done.returncode:
        pytest.skip(f"math-verify cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    program = (
        "from importlib.util import find_spec\n"
        "from grpo_math import Verdict, grade\n"
        "from grpo_math.grading import score\n"
        # The last pair needs a worker.
        "pairs = [('72', '#### 72'), ('72', '#### 73'), ('x^2+2x+1', r'\\boxed{(x+1)^2}')]\n"
        "assert grade('72', '#### 72') is Verdict.CORRECT\n"
        "print([score(completion, gold) for gold, completion in pairs])\n"
        "print([name for name in ('torch', 'trl', 'yaml', 'tqdm') if find_spec(name)])"
    )
    done = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == ["[1.0, 0.0, 1.0]", "[]"], done.stderr
    # The console script, too.
    (tmp_path / "rows.jsonl").write_text('{"gold": "72", "prediction": "#### 72"}\n')
    done = subprocess.run(
        [python.with_name("grpo-math"), "grade", "rows.jsonl", "--jsonl"], capture_output=True, text=True, cwd=tmp_path
    )
    assert json.loads(done.stdout)["verdict"] == "correct", done.stderr


def test_every_file_of_the_package_and_every_config_is_in_it(installed):
    folders = {"": "grpo_math", "launch_configs": "launch/configs"}
    folders |= {"accelerate_configs": "accelerate_configs", "deepspeed_configs": "deepspeed"}
    (package,) = installed.parents[1].glob("lib/python*/site-packages/grpo_math")
    for folder_in_package, here in folders.items():
        files = {path.relative_to(ROOT / here) for path in (ROOT / here).rglob("*") if path.is_file()}
        files = {path for path in files if "__pycache__" not in path.parts}
        assert files
        assert not {path for path in files if not (package / folder_in_package / path).is_file()}


def test_shipped_files_go_by_their_names_of_the_checkout_there(installed, tmp_path):
    recipe, config = "launch/configs/gsm8k_8gb.yaml", "accelerate_configs/zero2_offload.yaml"
    options = ("--gpus", 1, "--gpu-memory", 8, "--cpu-memory", 64, "--json", "--accelerate-config", config)
    done = run(installed, "plan", "--config", recipe, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "optimizer_state" in json.loads(done.stdout)["main_memory"]  # the DeepSpeed file that config names was read


def test_recipes_are_listed_and_copied_there(installed, tmp_path):
    lines = [line.split() for line in run(installed, "train", "--list", cwd=tmp_path).stdout.splitlines() if line]
    assert {path.stem for path in (ROOT / "launch/configs").glob("*.yaml")} <= {words[0] for words in lines}
    paths = [words[1] for words in lines if words[1].endswith(".yaml") and words[0] != "grpo-math"]
    assert paths
    assert all("site-packages" in path and Path(path).is_file() for path in paths)
    done = run(installed, "train", "--copy", "demo_cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo_cpu.yaml").read_bytes() == (ROOT / "launch/configs/demo_cpu.yaml").read_bytes()
