"""The seconds and the memory of the phases of a step."""

import pytest
import torch
from small_trainers import KINDS

from grpo_math.trainer.step_cost import measure_steps

MB = 2**20


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_measured_by_phase_and_a_second_update_of_a_rollout_has_no_other(kind, ours):
    trainer = ours(**KINDS[kind], num_iterations=2, max_steps=2)
    callbacks = [type(one) for one in trainer.callback_handler.callbacks]
    first, second = measure_steps(trainer)
    assert (set(first), set(second)) == ({"generation", "scoring", "update"}, {"update"})
    assert [type(one) for one in trainer.callback_handler.callbacks] == callbacks
    assert "_generate_single_turn" not in vars(trainer)
    for cost in (*first.values(), *second.values()):
        assert cost.seconds > 0
        assert 0 < cost.start <= cost.peak


def test_the_peak_is_that_of_the_phase_that_allocates(ours):
    trainer = ours(max_steps=2)
    trainer._prepare_inputs = after_allocating(trainer._prepare_inputs, 100 * MB)
    trainer._generate_single_turn = after_allocating(trainer._generate_single_turn, 300 * MB)
    for step in measure_steps(trainer):
        needed = {phase: (cost.peak - cost.start) / MB for phase, cost in step.items()}
        # Wide bounds: Linux counts resident pages in batches, which are larger on a machine with more cores.
        assert needed["scoring"] < 80
        assert 80 < needed["update"] < 240
        assert 250 < needed["generation"] < 440


def after_allocating(method, size):
    def call(*args, **kwargs):
        torch.ones(size, dtype=torch.uint8)
        return method(*args, **kwargs)

    return call
