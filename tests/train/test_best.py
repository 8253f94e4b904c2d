"""The best checkpoint of a run: kept, named, compared with the last weights, and taken by the other commands."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import TINY
from peft import PeftModel
from safetensors.torch import load_file
from small_runs import history
from transformers import AutoModelForCausalLM

from grpo_math.cli import main as command
from grpo_math.errors import UserError
from grpo_math.evaluation import of_run
from grpo_math.report.hub import contents
from grpo_math.run import checkpoints
from grpo_math.train.heldout import StopAt, best_and_last
from grpo_math.train.program import main

PRODUCTS = "eval_generated_products_accuracy"
EVALUATED = [
    *("--heldout_every", "1", "--heldout", '{"data": "generated:products", "n": 2}', "--eval_n", "4"),
    *("--keep_best", "--save_steps", "2", "--save_total_limit", "1", "--use_peft", "--report_to", "none"),
    *("--rewards", "rewards:letters"),
]


@pytest.mark.slow
def test_the_best_checkpoint_outlives_the_limit_and_is_compared_with_the_last(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "processes"))
    run_dir = tmp_path / "run"
    words = ["--model_name_or_path", tiny(), "--output_dir", str(run_dir), "--max_steps", "3"]
    assert main([*words, *TINY, "--eval_split=heldout", *EVALUATED]) == 0
    # A model of random weights is never right: no later evaluation is better than the first.
    best = json.loads((run_dir / checkpoints.BEST).read_text())
    assert best == {"step": 1, "metric": PRODUCTS, "value": 0.0, "path": "checkpoint-1"}
    assert [step for step, _ in checkpoints.checkpoints(run_dir)] == [3, 1]
    assert [line["step"] for line in history(run_dir) if PRODUCTS in line] == [1, 2, 3]
    output = capsys.readouterr().out
    assert "best     checkpoint-1: +0.0 points [" in output
    assert "on 4 problems that did not choose it: they do not differ clearly" in output

    names = ("adapter", "checkpoint-1", "checkpoint-3")
    tensors = [
        torch.cat([t.flatten() for t in load_file(run_dir / name / "adapter_model.safetensors").values()])
        for name in names
    ]
    assert torch.equal(tensors[0], tensors[2]), "the weights of the run are still the last"
    assert not torch.equal(tensors[0], tensors[1])
    best_dir, merged = run_dir / "checkpoint-1", tmp_path / "merged"

    def answer(*words):
        capsys.readouterr()
        assert command([*words, "--checkpoint", "best", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    problems = ["--data", "generated:products", "--split", "heldout", "--n", "2"]
    evaluated = answer("evaluate", "--run", str(run_dir), *problems)
    assert evaluated["trained"]["adapter"] == str(best_dir)
    assert evaluated["trained"]["results"] == str(run_dir / "evaluation-best/trained.json")
    assert of_run.read(str(run_dir)).trained[1] == str(run_dir / "adapter")

    answer("export", str(run_dir), "--merge", str(merged))
    base = AutoModelForCausalLM.from_pretrained(tiny(), dtype="bfloat16")
    expected = PeftModel.from_pretrained(base, str(best_dir)).merge_and_unload().state_dict()
    exported = AutoModelForCausalLM.from_pretrained(merged).state_dict()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)

    files = contents(run_dir, "me/x", checkpoint="best")
    assert files["adapter_model.safetensors"] == run_dir / "checkpoint-1/adapter_model.safetensors"
    assert "optimizer.pt" not in files
    with pytest.raises(UserError, match="checkpoint='checkpoint-2' is not a checkpoint of"):
        of_run.read(str(run_dir), checkpoint="checkpoint-2")


def test_a_run_without_a_best_checkpoint_says_how_to_get_one(tmp_path):
    with pytest.raises(UserError, match="train with keep_best"):
        checkpoints.named(tmp_path, "best")
    assert checkpoints.named(tmp_path, None) == tmp_path


def test_a_run_stops_when_the_accuracy_is_reached_twice_in_a_row():
    stops = []
    state = SimpleNamespace(log_history=[])
    for step, value in enumerate((0.9, 0.5, 0.95, 0.9), start=1):
        state.log_history += [{"step": step, "loss": 0.0}, {"step": step, PRODUCTS: value}]
        control = SimpleNamespace(should_training_stop=False, should_save=False)
        StopAt(PRODUCTS, 0.9).on_evaluate(None, state, control)
        stops.append(control.should_training_stop)
    assert stops == [False, False, False, True]


@pytest.mark.parametrize(("right", "output"), [(2, "they do not differ clearly"), (30, "they differ")])
def test_best_and_last_are_compared_in_pairs(right, output):
    def results(n):
        rows = [{"id": i, "problem": "p", "gold": "1", "completion": "c"} for i in range(40)]
        return {"rows": [{**row, "category": "correct" if row["id"] < n else "wrong_answer"} for row in rows]}

    assert best_and_last(results(right), results(0), 7).endswith(output)
