"""On a real GPU: what the plan takes as an allowance."""

import pytest
from benchmarks.card_rates import outside_torch, rates

from grpo_math.planner.memory import CONTEXT
from grpo_math.system.machine import GB

pytestmark = pytest.mark.gpu


def test_the_card_needs_no_more_outside_torch_than_the_plan_allows(device, figure):
    """Other processes may use no memory of the GPU."""
    measured, outside = rates(), outside_torch()
    says = "{tflops:.0f} TFLOP/s in 16 bit, {bandwidth:.0f} GB/s, {launch_us:.1f} us a launch".format(**measured)
    figure(says=f"{says}, {outside / GB:.2f} GB outside torch", **measured, outside_torch_bytes=outside)
    assert min(measured.values()) > 0
    assert outside <= CONTEXT
