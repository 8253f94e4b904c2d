"""The benchmark measures what it says: tokens counted by hand, the same gradients, and a wrong speed-up is seen."""

from __future__ import annotations

import json

import pytest
from update_benchmark import GROUP, Shape, bench_update, completion_lengths, table

TINY = {
    "mixed": Shape(prompt=7, longest=12, mean=1 / 3, groups=2),
    "no signal": Shape(prompt=7, longest=12, mean=1 / 3, groups=2, degenerate=1),
}


@pytest.mark.full
def test_both_trainers_have_the_same_gradient_and_ours_computes_prompts_and_completions_alone(tiny):
    results = bench_update(tiny("llama"), TINY, runs=2, dtype="float32", lora_r=4)
    assert json.loads(json.dumps(results)) == results
    assert results["same"]
    for result, (name, shape) in zip(results["shapes"], TINY.items(), strict=True):
        lengths = completion_lengths(shape)
        trained = lengths[shape.degenerate * GROUP :]
        assert result["tokens_trl"] == len(lengths) * (shape.prompt + max(lengths))
        least = (shape.groups - shape.degenerate) * (shape.prompt - 1) + sum(trained)
        # A group that lies in several micro-batches has its prompt in each of them; without signal, one row may stay.
        most = len(trained) * (shape.prompt - 1) + sum(trained) + shape.groups * (shape.prompt + max(lengths))
        assert least <= result["tokens_ours"] <= most
        assert result["difference"] < 1e-4
        assert 0 < result["peak_bytes_ours"] < result["peak_bytes_trl"]
        assert name in table(results)
