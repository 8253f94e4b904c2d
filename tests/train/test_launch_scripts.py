"""launch/*.sh with stand-ins for the commands that they call; the sbatch scripts are in test_slurm.py."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
import yaml
from launching import ROOT

from grpo_math.generation.server import RANKS, served_rank


@pytest.fixture
def said(tmp_path):
    """A function: run a script, and get the commands that it called, one a line."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("python", "vllm", "grpo-math"):
        (commands / name).write_text(f'#!/usr/bin/env bash\necho "{name} $*"\n')
        (commands / name).chmod(0o755)

    def call(script, *arguments, code=0):
        environment = {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}
        environment.pop("GRPO_MATH_VLLM", None)  # the stand-in serves
        command = [str(ROOT / "launch" / script), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        return done.stdout.splitlines() or done.stderr.splitlines()

    return call


def test_train_gives_accelerate_what_stands_before_the_dashes_and_the_recipe_the_rest(said):
    before, after = ["--num_processes", "4"], ["--seed", "1"]
    expected = "python -m grpo_math.train.ranks --config_file a.yaml {}-m grpo_math.train --config r.yaml --seed 1"
    assert said("train.sh", "r.yaml", "a.yaml", *before, "--", *after) == [expected.format("--num_processes 4 ")]
    assert said("train.sh", "r.yaml", "a.yaml", *after) == [expected.format("")]


@pytest.mark.parametrize("script", ["train.sh", "serve_vllm.sh", "evaluate.sh"])
def test_a_script_without_arguments_says_how_it_is_called(script, said):
    assert any(f"./launch/{script} R" in line for line in said(script, code=2))


def test_the_server_takes_adapters_for_a_lora_and_whole_weights_otherwise(said, tmp_path):
    lora = {"model_name_or_path": "some/model", "use_peft": True, "lora_r": 32}
    (tmp_path / "lora.yaml").write_text(yaml.safe_dump(lora))
    (tmp_path / "full.yaml").write_text(yaml.safe_dump({"model_name_or_path": "some/model"}))
    (line,) = said("serve_vllm.sh", tmp_path / "lora.yaml", "--port", 8001)
    assert line.startswith("vllm serve some/model ")
    assert line.endswith(" --enable-lora --max-lora-rank 32 --port 8001")
    for rank in (1, 9, *RANKS):
        (tmp_path / "lora.yaml").write_text(yaml.safe_dump({**lora, "lora_r": rank}))
        assert said("serve_vllm.sh", tmp_path / "lora.yaml")[0].endswith(f" --max-lora-rank {served_rank(rank)}")
    (line,) = said("serve_vllm.sh", tmp_path / "full.yaml")
    assert line.endswith('--weight-transfer-config {"backend": "nccl"}')


@pytest.mark.parametrize("words", [["--host", "0.0.0.0"], ["--host=10.0.0.1"]])
def test_a_server_that_others_can_reach_needs_a_key(words, said, tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    (tmp_path / "lora.yaml").write_text("model_name_or_path: some/model\nuse_peft: true\n")
    (tmp_path / "full.yaml").write_text("model_name_or_path: some/model\n")
    assert "set VLLM_API_KEY" in said("serve_vllm.sh", tmp_path / "lora.yaml", *words, code=2)[0]
    assert said("serve_vllm.sh", tmp_path / "full.yaml", *words)[0].startswith("vllm serve")  # TRL's sync knows no key
    assert said("serve_vllm.sh", tmp_path / "lora.yaml", "--host", "127.0.0.1")[0].startswith("vllm serve")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    (line,) = said("serve_vllm.sh", tmp_path / "lora.yaml", *words)
    assert line.endswith(" ".join(words))
    assert "secret" not in line


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_evaluate_asks_base_and_trained_model_the_same_and_compares_them(kind, said, tmp_path):
    run = tmp_path / "run"
    (run / kind).mkdir(parents=True)
    (run / "config.yaml").write_text("model_name_or_path: some/model\ntemplate: boxed\n")
    base, trained, compared = said("evaluate.sh", "run", "math500", "--n", 8)
    same = "--data math500 --template boxed --n 8 --output run/evaluation"
    assert base == f"grpo-math evaluate --model some/model {same}/base.json"
    of = "some/model --adapter run/adapter" if kind == "adapter" else "run/model"
    assert trained == f"grpo-math evaluate --model {of} {same}/trained.json"
    assert compared == "grpo-math evaluate --compare run/evaluation/base.json run/evaluation/trained.json"


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say():
    scripts = [ROOT / ".ci/run", *(ROOT / "launch").glob("*.sh"), *(ROOT / "launch/slurm").iterdir()]
    done = subprocess.run(["shellcheck", *map(str, scripts)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
