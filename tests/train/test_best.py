"""The best checkpoint of a run: kept, named, and taken by the other commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launching import TINY
from safetensors.torch import load_file
from small_runs import history

from grpo_math.errors import UserError
from grpo_math.evaluation import of_run
from grpo_math.report.hub import prepared
from grpo_math.run import checkpoints
from grpo_math.train.program import main

PRODUCTS = "eval_generated_products_accuracy"
EVALUATED = [
    *("--heldout_every", "1", "--heldout", '{"data": "generated:products", "n": 2}', "--eval_n", "4"),
    *("--keep_best", "--save_steps", "2", "--save_total_limit", "1", "--use_peft", "--report_to", "none"),
    *("--rewards", "rewards:letters"),
]


@pytest.mark.slow
def test_the_best_checkpoint_outlives_the_limit(tiny, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "processes"))
    run_dir = tmp_path / "run"
    words = ["--model_name_or_path", tiny(), "--output_dir", str(run_dir), "--max_steps", "3"]
    assert main([*words, *TINY, "--eval_split=heldout", *EVALUATED]) == 0
    # A model of random weights is never right: no later evaluation is better than the first.
    best = json.loads((run_dir / checkpoints.BEST).read_text())
    assert best == {"step": 1, "metric": PRODUCTS, "value": 0.0, "path": "checkpoint-1"}
    assert [step for step, _ in checkpoints.checkpoints(run_dir)] == [3, 1]
    assert [line["step"] for line in history(run_dir) if PRODUCTS in line] == [1, 2, 3]
    names = ("adapter", "checkpoint-1", "checkpoint-3")
    tensors = [
        torch.cat([t.flatten() for t in load_file(run_dir / name / "adapter_model.safetensors").values()])
        for name in names
    ]
    assert torch.equal(tensors[0], tensors[2]), "the weights of the run are still the last"
    assert not torch.equal(tensors[0], tensors[1])
    assert of_run.read(str(run_dir), checkpoint="best").trained[1] == str(run_dir / "checkpoint-1")
    assert of_run.read(str(run_dir), checkpoint="best").folder == run_dir / "evaluation-best"
    assert of_run.read(str(run_dir)).trained[1] == str(run_dir / "adapter")
    sizes = prepared(run_dir, "me/x", checkpoint="best")["files"]
    assert "adapter_model.safetensors" in sizes
    assert "optimizer.pt" not in sizes
    with pytest.raises(UserError, match="checkpoint='checkpoint-2' is not a checkpoint of"):
        of_run.read(str(run_dir), checkpoint="checkpoint-2")


def test_a_run_without_a_best_checkpoint_says_how_to_get_one(tmp_path):
    with pytest.raises(UserError, match="train with keep_best"):
        checkpoints.named(tmp_path, "best")
    assert checkpoints.named(tmp_path, None) == tmp_path
