"""The benchmark measures what it says: tokens counted by hand, the same gradients, and a wrong speed-up is seen."""

from __future__ import annotations

import json

import pytest
import torch
import update_benchmark as bench
from update_benchmark import GROUP, SHAPES, Shape, bench_update, completion_lengths, rollout, table

TINY = {
    "mixed": Shape(prompt=7, longest=12, mean=1 / 3, groups=2),
    "no signal": Shape(prompt=7, longest=12, mean=1 / 3, groups=2, degenerate=1),
}


@pytest.fixture(scope="module")
def results(tiny):
    return bench_update(tiny("llama"), TINY, runs=2, dtype="float32", lora_r=4, progress=False)


@pytest.mark.full
def test_trl_computes_every_padded_token_and_ours_at_most_prompts_and_completions(results):
    for result, shape in zip(results["shapes"], TINY.values(), strict=True):
        lengths = completion_lengths(shape)
        trained = lengths[shape.degenerate * GROUP :]
        assert result["tokens_trl"] == len(lengths) * (shape.prompt + max(lengths))
        least = (shape.groups - shape.degenerate) * (shape.prompt - 1) + sum(trained)
        # A group that lies in several micro-batches has its prompt in each of them; without signal, one row may stay.
        most = len(trained) * (shape.prompt - 1) + sum(trained) + shape.groups * (shape.prompt + max(lengths))
        assert least <= result["tokens_ours"] <= most


@pytest.mark.full
def test_both_trainers_have_the_same_gradient_and_every_field_is_there(results):
    assert json.loads(json.dumps(results)) == results
    assert results["same"]
    for name, result in zip(TINY, results["shapes"], strict=True):
        assert result["name"] == name
        assert result["difference"] < 1e-4
        assert result["ratio"] > 0
        assert len(result["ratios"]) == 2
        assert 0 < result["peak_bytes_ours"] < result["peak_bytes_trl"]
    assert all(name in table(results) for name in TINY)


@pytest.mark.full
def test_a_wrong_gradient_is_reported(tiny, monkeypatch):
    inner = bench.MathGRPOTrainer._compute_loss
    monkeypatch.setattr(bench.MathGRPOTrainer, "_compute_loss", lambda self, *args: 0.9 * inner(self, *args))
    wrong = bench_update(tiny("llama"), {"mixed": TINY["mixed"]}, runs=1, dtype="float32", progress=False)
    assert not wrong["same"]
    assert wrong["shapes"][0]["difference"] == pytest.approx(0.1, abs=1e-3)
    assert "the ratios say nothing" in table(wrong)


def test_the_peak_is_the_most_bytes_held_at_once():
    meter = bench.Meter(torch.device("cpu"))
    meter.deep = True
    meter.on_step_begin(None, None, None)
    for _ in range(3):
        a = torch.empty(1000, dtype=torch.float32)
        b = torch.empty(500, dtype=torch.float32)
        del a, b
    meter.on_step_end(None, None, None)
    assert 6000 <= meter.peak < 6400


@pytest.mark.parametrize("name", SHAPES)
def test_the_shapes_are_what_their_names_say(name):
    shape = SHAPES[name]
    batch = rollout(shape, vocabulary=100)
    lengths = batch["completion_mask"].sum(dim=1)
    assert lengths.float().mean().item() == pytest.approx(shape.mean * shape.longest, rel=0.01)
    assert lengths.max() == shape.longest
    signal = batch["advantages"].view(shape.groups, GROUP).ne(0).any(dim=1)
    assert int((~signal).sum()) == shape.degenerate
    assert batch["num_items_in_batch"] == lengths.sum()
