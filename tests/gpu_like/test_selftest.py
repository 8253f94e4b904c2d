"""The self-test on the pretended GPU: TRL's completions are replayed, and an update is measured."""

import json
import os

import launching
import pytest
import torch
from gpu_like.stand_ins import NAME

from grpo_math import cli
from grpo_math.checks import selftest

SMALL_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


@pytest.mark.parametrize(
    ("cards", "capability", "half", "only"), [(2, 7.5, "float16", ""), (1, 9.0, "bfloat16", "packed scores in")]
)
def test_each_check_of_a_gpu_runs(cards, capability, half, only, monkeypatch, tmp_path, capsys):
    """Next to another Turing card: TRL would spread the models over both, and torch would emulate bfloat16."""
    monkeypatch.setenv("GRPO_MATH_CACHE", str(tmp_path))
    monkeypatch.setattr(selftest, "MEDIUM", {"hidden_size": 64, "intermediate_size": 96, **SMALL_HEADS})
    short = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}
    monkeypatch.setattr(selftest, "UPDATES", {**short, "max_completion_length": 8})
    monkeypatch.setattr(selftest, "RUNS", {"kl": selftest.RUNS["kl, moving reference"]})
    launching.nvidia_smi(tmp_path, "".join(f"{i}, GPU-{i}, 15360, 0, {capability}\\n" for i in range(cards)))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    answers = {
        "device_count": lambda: len(os.environ.get("CUDA_VISIBLE_DEVICES", "," * (cards - 1)).split(",")),
        "get_device_capability": lambda device=None: tuple(map(int, str(capability).split("."))),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= 8,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    cli.main(["selftest", "--json", "--only", only])
    answer = json.loads(capsys.readouterr().out)
    rows = {row["what"]: row for row in answer["checks"]}
    assert answer["machine"]["gpu"] == NAME
    # The pretended device has neither time nor memory.
    assert [what for what in rows if not rows[what]["ok"] and not what.startswith("update: seconds")] == []
    assert all(rows[what]["measured"] is not None for what in rows)
    assert f"packed scores in {half}" in rows
    assert len(rows) == (1 if only else 10)
