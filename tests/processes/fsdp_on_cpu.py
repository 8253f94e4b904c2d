"""Runs a program with FSDP2 on the CPU: fsdp_on_cpu.py PROGRAM ARGUMENTS, with use_cpu off, under an FSDP config.

accelerate takes FSDP with an accelerator alone and runs DDP on a CPU in its place. Here it is told that gloo is one;
sharding, gathering and what the trainer does with them are PyTorch's own. `counted` counts reductions of gradients.
"""

import os
import runpy
import sys
from pathlib import Path

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

reduce = _fsdp_param_group.foreach_reduce


def counted(*args, **kwargs):
    counted.calls += 1
    return reduce(*args, **kwargs)


if __name__ == "__main__":
    _fsdp_param_group.foreach_reduce = counted
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
