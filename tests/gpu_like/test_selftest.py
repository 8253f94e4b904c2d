"""The self-test on the pretended GPU: TRL's completions are replayed, and an update is measured."""

import json

from gpu_like.stand_ins import NAME

from grpo_math import cli
from grpo_math.checks import selftest

SMALL_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def test_each_check_of_a_gpu_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("GRPO_MATH_CACHE", str(tmp_path))
    monkeypatch.setattr(selftest, "MEDIUM", {"hidden_size": 64, "intermediate_size": 96, **SMALL_HEADS})
    short = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}
    monkeypatch.setattr(selftest, "UPDATES", {**short, "bf16": True, "max_completion_length": 8})
    monkeypatch.setattr(selftest, "RUNS", {"kl": selftest.RUNS["kl, moving reference"]})
    cli.main(["selftest", "--json"])
    answer = json.loads(capsys.readouterr().out)
    rows = {row["what"]: row for row in answer["checks"]}
    assert answer["machine"]["gpu"] == NAME
    # The pretended device has neither time nor memory.
    assert [what for what in rows if not rows[what]["ok"] and not what.startswith("update: seconds")] == []
    assert all(rows[what]["measured"] is not None for what in rows)
    assert len(rows) == 10
