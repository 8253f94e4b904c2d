"""The tables of docs/planning.md say what `grpo-math plan` says. tests/test_docs.py compares their texts."""

from __future__ import annotations

import pytest
from benchmarks import plan_8gb
from benchmarks.layouts import GPUS, MAIN_MEMORY, MEMORY, MODELS, RECIPE, best, cells

from grpo_math.planner import devices, plan


def test_a_row_has_a_cell_for_each_number_and_size_of_gpus():
    assert [cell.column for cell in cells(MODELS[0])] == [f"{gpus}x{gb}" for gpus in GPUS for gb in MEMORY]


def test_a_cell_is_what_a_plan_of_its_settings_says():
    cell = best("Qwen/Qwen2.5-14B", 8, 24)
    assert cell.text == "4+4 tp2 z3"
    recipe = {**RECIPE, "model_name_or_path": cell.model, **devices.recommend(8, 512 + 1024)[0]}
    zero = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}
    answer = plan(recipe, gpus=8, gpu_gb=24, cpu_gb=MAIN_MEMORY, accelerate=zero)
    assert answer["fits"]
    assert [role["gpus"] for role in answer["layout"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("model", plan_8gb.MODELS[:2])
@pytest.mark.parametrize("quantised", [False, True])
def test_vllm_beside_training_fits_8_gb_where_the_plan_recommends_it(model, quantised):
    alone = plan_8gb.recipe(model, quantised, 4, 256, None)
    answer = plan(alone, gpus=1, gpu_gb=8, cpu_gb=32, prompt_tokens=plan_8gb.PROMPT)
    recommended = " ".join((answer["recommended"] or {}).get("set", []))
    cell = plan_8gb.cell(model, quantised, 4, 256, True)
    assert cell.startswith("(") != ("vllm_mode: colocate" in recommended), (cell, recommended)
    if not cell.startswith("("):
        assert cell.partition(" at ")[2] in recommended
