"""The pretended device does what a CUDA device does, where it claims to: these are tests of test equipment."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    "mixed",
    [
        lambda torch, on_gpu, here: on_gpu + here,
        lambda torch, on_gpu, here: torch.cat([on_gpu, here]),
        lambda torch, on_gpu, here: here[on_gpu[0].long()],
        lambda torch, on_gpu, here: torch.nn.functional.scaled_dot_product_attention(on_gpu, here, here),
    ],
    ids=["add", "cat", "index", "attention"],
)
def test_two_devices_do_not_mix(mixed):
    import torch

    with pytest.raises(RuntimeError, match="device"):
        mixed(torch, torch.ones(2, 2, device="cuda"), torch.ones(2, 2))


def test_a_number_on_the_cpu_may_stand_beside_tensors_of_the_device():
    import torch

    on_gpu = torch.ones(2, device="cuda")
    assert (on_gpu * torch.tensor(3.0)).tolist() == [3.0, 3.0]
    assert on_gpu.masked_fill(on_gpu > 0, torch.tensor(5.0)).tolist() == [5.0, 5.0]


WAITS = {
    "item": lambda torch, x: x.sum().item(),
    "tolist": lambda torch, x: x.tolist(),
    "bool": lambda torch, x: bool(x.any()),
    "to the cpu": lambda torch, x: x.cpu(),
    "from the cpu": lambda torch, x: torch.ones(2).to("cuda"),
    "from a list": lambda torch, x: torch.tensor([1, 2], device="cuda"),
    "mask": lambda torch, x: x[x > 1],
    "nonzero": lambda torch, x: x.nonzero(),
    "unique": lambda torch, x: x.unique(),
    "repeats": lambda torch, x: torch.repeat_interleave(x.long()),
    "cpu index": lambda torch, x: x[torch.tensor([0])],
    "assigned through a mask": lambda torch, x: x.__setitem__(x > 1, x[:1].sum()),
}
DOES_NOT_WAIT = {
    "arithmetic": lambda torch, x: (x + 1).sum() * 2,
    "made there": lambda torch, x: torch.arange(3, device="cuda") + torch.zeros(3, device="cuda"),
    "index": lambda torch, x: x[torch.zeros(1, dtype=torch.long, device="cuda")],
    "slice": lambda torch, x: x[:1],
    "shape": lambda torch, x: (x.shape, x.numel(), x.dtype),
    "not blocking": lambda torch, x: torch.ones(2).to("cuda", non_blocking=True),
    "repeats of known number": lambda torch, x: torch.repeat_interleave(x, x.long(), output_size=3),
}


@pytest.mark.parametrize("name", [*WAITS, *DOES_NOT_WAIT])
def test_a_wait_is_counted_with_its_line(name):
    import torch
    from gpu_like.counting import counting

    x = torch.tensor([1.0, 2.0], device="cuda")
    with counting() as counts:
        ({**WAITS, **DOES_NOT_WAIT})[name](torch, x)
    assert counts.total() == (name in WAITS), counts
    assert all("test_device.py" in line for line in counts)


def test_what_cannot_be_pretended_says_so():
    import torch

    with pytest.raises(NotImplementedError, match="in place"):
        torch.add(torch.ones(2, device="cuda"), 1, out=torch.empty(0, device="cuda"))
