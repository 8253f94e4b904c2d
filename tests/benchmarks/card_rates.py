"""What a GPU reaches: matrix products, copies, launches, and the memory that torch's allocator does not manage."""

import torch
from torch.utils.benchmark import Timer


def rates() -> dict[str, float]:
    """Return TFLOP/s of matrix products in 16 and 32 bit, GB/s of copies, and microseconds to launch a kernel."""
    side = 64 * torch.cuda.get_device_properties(0).multi_processor_count
    a = torch.randn(side, side, device="cuda")
    tensors = {"a": a, "b": a.half(), "c": a.repeat(4, 1), "d": a[0, :1].clone()}
    lines = ("b @ b", "a @ a", "c.clone()", "d.add_(1)")
    half, full, copy, launch = (Timer(line, globals=tensors).blocked_autorange().median for line in lines)
    flops, moved = 2 * side**3 / 1e12, 2 * 4 * tensors["c"].numel() / 1e9  # a copy reads and writes
    return {"tflops": flops / half, "float32": flops / full, "bandwidth": moved / copy, "launch_us": launch * 1e6}


def outside_torch() -> int:
    """Return the bytes on the GPU that torch's allocator does not manage, of all processes."""
    free, total = torch.cuda.mem_get_info()
    return max(0, total - free - torch.cuda.memory_reserved())
