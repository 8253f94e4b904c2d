"""The README's table: every cell adds up, divides, and uses each GPU once."""

from __future__ import annotations

import pytest
from benchmarks.layouts import GPUS, MAIN_MEMORY, MEMORY, MODELS, RECIPE, best, cells

from grpo_math.planner.plan import MARGIN
from grpo_math.run.machine import GB


@pytest.mark.parametrize("model", MODELS)
def test_every_cell_is_consistent_in_itself(model):
    row = list(cells(model))
    assert [cell.column for cell in row] == [f"{gpus}x{gb}" for gpus in GPUS for gb in MEMORY]
    for cell in row:
        if cell.counted is None:
            continue
        counted, layout = cell.counted, cell.counted.layout
        # Sums.
        answer = counted.answer()
        totals = {phase: sum(terms.values()) for phase, terms in answer["phases"].items()}
        assert answer["peak_gb"] == pytest.approx(max(totals["training"], totals["generation"]) / GB, abs=1e-3)
        assert max(totals.values()) <= MARGIN * cell.gpu_gb * GB
        assert sum(answer["main_memory"].values()) <= MAIN_MEMORY * GB
        assert ("server" in totals) == (layout.generation == "server")
        # Who runs where.
        used = [gpu for role in answer["layout"] for gpu in role["gpus"]]
        assert sorted(used) == list(range(cell.gpus))
        assert layout.policy + layout.server + layout.idle == cell.gpus
        assert not layout.idle or "idle" in layout.why
        # Divisibility.
        batch, rows = counted.batch, RECIPE["prompts_per_step"] * RECIPE["num_generations"]
        assert batch.processes == layout.policy
        assert batch.processes * batch.rows * batch.steps == batch.rollout == rows
        assert batch.rows <= RECIPE["per_device_train_batch_size"]
        shape = counted.machine.shape
        assert shape.heads % layout.tensor_parallel == 0
        assert layout.server % layout.tensor_parallel == 0
        assert (counted.zero.stage == 3) == (cell.config == "z3")


@pytest.mark.parametrize("model", MODELS)
def test_more_memory_never_makes_a_cell_empty(model):
    for gpus in GPUS:
        fits = [best(model, gpus, gb).counted is not None for gb in MEMORY]
        assert fits == sorted(fits)


def test_a_cell_is_what_a_plan_of_its_settings_says():
    from grpo_math.planner import devices, plan

    cell = best("Qwen/Qwen2.5-14B", 8, 24)
    assert cell.text == "4+4 tp2 z3"
    recipe = {**RECIPE, "model_name_or_path": cell.model, **devices.recommend(8, 512 + 1024)[0]}
    zero = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}
    answer = plan(recipe, gpus=8, gpu_gb=24, cpu_gb=MAIN_MEMORY, accelerate=zero)
    assert answer["fits"]
    assert [role["gpus"] for role in answer["layout"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
