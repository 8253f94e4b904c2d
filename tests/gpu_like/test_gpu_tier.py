"""The tests that need a GPU (tests/gpu), rehearsed on the pretended one: that they run, not what they measure."""

from __future__ import annotations

import pytest
from gpu_like import device, plugin

REHEARSED = (
    "tests/gpu/test_update.py::test_the_gradient_is_that_of_trl[16-float32-0.0001]",
    "tests/gpu/test_update.py::test_the_update_is_measured_against_that_of_trl[16]",
    "tests/gpu/test_update.py::test_a_run_that_goes_on_from_a_checkpoint_ends_as_one_that_was_not_stopped[lora]",
    "tests/gpu/test_update.py::test_a_4_bit_base_is_scored_as_trl_scores_it_and_trains",
    "tests/gpu/test_memory.py::test_the_peak_of_a_run_is_within_its_plan[lora]",
    "tests/gpu/test_vllm.py::test_a_run_with_a_vllm_server_on_the_same_gpu",
)


@pytest.mark.full
def test_the_gpu_tier_can_be_rehearsed():
    if reason := device.hindrance():
        pytest.skip(f"no pretended GPU: {reason}")
    ended = plugin.run(REHEARSED)
    failed = [f"{name}\n{result['text']}" for name, result in ended.items() if result["outcome"] == "failed"]
    assert not failed, "\n\n".join(failed)
    skipped = {name for name, result in ended.items() if result["outcome"] == "skipped"}
    assert skipped == {REHEARSED[3], REHEARSED[5]}, "what cannot be rehearsed says so"
