"""On a real GPU: which kernels an update runs, how long none runs, and which lines wait for the GPU."""

import warnings
from collections import Counter

import pytest
import torch
from benchmarks.card_rates import rates
from benchmarks.update_phase import SHAPES, Shape, contestants, rollout, waits_by_line
from gpu_like.counting import OURS, counting, of

pytestmark = pytest.mark.gpu
KINDS = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
TOP = 15


def busy_seconds(kernels) -> float:
    """The time in which at least one kernel runs."""
    seconds, end = 0.0, 0
    for start, length in sorted((event.start_ns(), event.duration_ns()) for event in kernels):
        seconds += max(0, start + length - max(start, end)) / 1e9
        end = max(end, start + length)
    return seconds


def least_flops(ours, lora_r: int) -> float:
    """FLOPs of the products with weights, forward and backward, for the tokens that are computed.

    Does not count attention, nor what checkpointing computes again.
    """
    weights = sum(weight.numel() for weight in ours.trainer.model.parameters() if weight.dim() == 2)
    return ours.tokens * weights * (4 if lora_r else 6)


@pytest.mark.parametrize("lora_r", [16, 0])
def test_an_update_waits_for_the_gpu_as_rarely_as_on_the_pretended_one(lora_r, model, rehearsal, tmp_path, figure):
    """The floor is the arithmetic of the update at the rate that this card reaches."""
    shape = Shape(prompt=5, longest=8, mean=1 / 2, groups=2) if rehearsal else SHAPES["gsm8k"]
    _, ours = contestants(model, shape, torch.bfloat16, lora_r, str(tmp_path))
    batch = rollout(shape, ours.trainer.model.config.vocab_size)
    for _ in range(3):  # kernels are compiled and chosen
        ours.step(batch)
    seconds = ours.seconds
    with counting() as counts:
        waits = waits_by_line(ours, batch)
    with warnings.catch_warnings(), torch.profiler.profile(activities=KINDS[: 1 + (not rehearsal)]) as profiler:
        warnings.simplefilter("ignore")
        ours.step(batch)
    events = profiler.profiler.kineto_results.events()
    kernels = [event for event in events if "CUDA" in str(event.device_type())]
    by_kernel = Counter()
    for event in kernels:
        by_kernel[event.name()[:100]] += event.duration_ns() / 1e6
    floor, busy = least_flops(ours, lora_r) / rates()["tflops"] / 1e12, busy_seconds(kernels) / seconds
    figure(
        says=f"{seconds * 1e3:.1f} ms, {seconds / floor:.1f}x of the floor, kernels run {busy:.0%} of the time",
        lora_r=lora_r,
        seconds=seconds,
        floor_seconds=floor,
        busy_share=busy,
        kernels=len(kernels),
        top_kernels_ms=by_kernel.most_common(TOP),
        waits=(counts if rehearsal else waits).most_common(TOP),
    )
    assert kernels or rehearsal
    assert of(counts if rehearsal else waits, "grpo_math") <= OURS
