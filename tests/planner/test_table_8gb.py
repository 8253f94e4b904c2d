"""The table of what fits 8 GB says of vLLM beside training what `grpo-math plan` recommends for the same recipe."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from grpo_math.planner import plan

FILE = Path(__file__).parents[1] / "benchmarks" / "plan_8gb.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("plan_8gb", FILE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("quantised", [False, True])
def test_vllm_beside_training_fits_in_the_table_where_the_plan_recommends_it(benchmark, number, quantised):
    model = benchmark.MODELS[number]
    alone = benchmark.recipe(model, quantised, 4, 256, None)
    answer = plan(alone, gpus=1, gpu_gb=8, cpu_gb=32, prompt_tokens=benchmark.PROMPT)
    recommended = " ".join((answer["recommended"] or {}).get("set", []))
    cell = benchmark.cell(model, quantised, 4, 256, True)
    assert cell.startswith("(") != ("vllm_mode: colocate" in recommended), (cell, recommended)
    if not cell.startswith("("):
        assert cell.partition(" at ")[2] in recommended
