"""The pretended device does what a CUDA device does, where it claims to: these are tests of test equipment."""

import pytest
import torch
from gpu_like.counting import counting

MIXED = {
    "add": lambda on_gpu, here: on_gpu + here,
    "cat": lambda on_gpu, here: torch.cat([on_gpu, here]),
    "index": lambda on_gpu, here: here[on_gpu[0].long()],
    "attention": lambda on_gpu, here: torch.nn.functional.scaled_dot_product_attention(on_gpu, here, here),
}
WAITS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x.any()),
    "to the cpu": lambda x: x.cpu(),
    "from the cpu": lambda x: torch.ones(2).to("cuda"),
    "from a list": lambda x: torch.tensor([1, 2], device="cuda"),
    "mask": lambda x: x[x > 1],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: torch.repeat_interleave(x.long()),
    "cpu index": lambda x: x[torch.tensor([0])],
    "assigned through a mask": lambda x: x.__setitem__(x > 1, x[:1].sum()),
}
DOES_NOT_WAIT = {
    "arithmetic": lambda x: (x + 1).sum() * torch.tensor(3.0),
    "made there": lambda x: torch.arange(3, device="cuda") + torch.zeros(3, device="cuda"),
    "index": lambda x: x[torch.zeros(1, dtype=torch.long, device="cuda")],
    "not blocking": lambda x: torch.ones(2).to("cuda", non_blocking=True),
    "repeats of known number": lambda x: torch.repeat_interleave(x, x.long(), output_size=3),
}


@pytest.mark.parametrize("mixed", MIXED)
def test_two_devices_do_not_mix(mixed):
    with pytest.raises(RuntimeError, match="device"):
        MIXED[mixed](torch.ones(2, 2, device="cuda"), torch.ones(2, 2))


@pytest.mark.parametrize("name", [*WAITS, *DOES_NOT_WAIT])
def test_a_wait_is_counted_with_its_line(name):
    x = torch.tensor([1.0, 2.0], device="cuda")
    with counting() as counts:
        {**WAITS, **DOES_NOT_WAIT}[name](x)
    assert counts.total() == (name in WAITS), counts
    assert all("test_device.py" in line for line in counts)
