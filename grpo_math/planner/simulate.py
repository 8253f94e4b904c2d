"""`grpo-math plan --simulate`: a recipe's own trainer at full size, on tensors that have a shape and no memory.

simulation/ runs it, in a process of its own; here that process is started, and what it says is put into words.

Does not import torch, and counts nothing from shapes: memory.py does.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_math.errors import UserError
from grpo_math.planner.memory import CONTEXT
from grpo_math.planner.plan import MARGIN
from grpo_math.run.machine import GB


def simulate(
    config: str, *, prompt_tokens: int | None = None, gpu_gb: float | None = None, fields: Sequence[str] = ()
) -> dict[str, Any]:
    """What `grpo-math plan --simulate --json` prints: bytes of one process on one GPU. Takes minutes.

    ``fits`` is None where ``gpu_gb`` is not said. Raises a `UserError` for what cannot be simulated.
    """
    command = [sys.executable, "-m", "grpo_math.planner.simulation.run", "--config", config, *fields]
    if prompt_tokens is not None:
        command += ["--prompt-tokens", str(prompt_tokens)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    try:
        answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise UserError(f"the simulation ended with exit code {ran.returncode}: see above") from None
    if "error" in answer:
        raise UserError(answer["error"])
    answer["cuda_context"] = CONTEXT
    answer["peak_gb"] = round((answer["reserved"] + CONTEXT) / GB, 3)
    answer["gpu_gb"] = gpu_gb
    answer["fits"] = None if gpu_gb is None else answer["peak_gb"] <= MARGIN * gpu_gb
    return answer


def words(answer: Mapping[str, Any]) -> str:
    """What `grpo-math plan --simulate` prints.

    >>> tensor = {"bytes": GB, "shape": [64, 8], "dtype": "bfloat16", "kind": "activations", "line": "a.py:3 forward"}
    >>> print(words({"fits": True, "gpu_gb": 8, "peak_gb": 3.6, "live": 2 * GB, "reserved": 3 * GB, "seconds": 60.0,
    ...     "phases": {"forward": {"live": 2 * GB, "reserved": 3 * GB}}, "peak_phase": "forward",
    ...     "kinds": {"weights": GB, "activations": GB}, "cuda_context": GB, "largest": [tensor],
    ...     "training": {"live": 2 * GB, "reserved": 3 * GB}}))
    fits: 3.6 of 8 GB; reserved 3.00 GB, of which at most 2.00 GB are live at once, and 1.00 GB of CUDA context
    phase          live    reserved by then
    forward        2.00 GB     3.00 GB
    at the peak (forward): weights 1.00 GB, activations 1.00 GB
    the largest tensors there:
       1.00 GB  64 x 8 bfloat16  activations  a.py:3 forward
    (two steps of one process in 60 s; without generation 3.00 GB reserved)
    """

    def gb(size: int) -> str:
        return f"{size / GB:.2f} GB" if size >= 0.01 * GB else f"{size / 2**20:.1f} MB"

    verdict = {True: "fits", False: "does not fit", None: "simulated"}[answer["fits"]]
    of = f" of {answer['gpu_gb']:g}" if answer["gpu_gb"] else ""
    held = f"reserved {gb(answer['reserved'])}, of which at most {gb(answer['live'])} are live at once"
    context = f"and {gb(answer['cuda_context'])} of CUDA context"
    lines = [f"{verdict}: {answer['peak_gb']:.1f}{of} GB; {held}, {context}", f"{'phase':<14} live    reserved by then"]
    for phase, sizes in answer["phases"].items():
        lines.append(f"{phase:<11} {gb(sizes['live']):>10} {gb(sizes['reserved']):>11}")
    kinds = ", ".join(f"{kind} {gb(size)}" for kind, size in answer["kinds"].items() if size >= 2**20)
    lines.append(f"at the peak ({answer['peak_phase']}): {kinds}")
    lines.append("the largest tensors there:")
    for tensor in answer["largest"]:
        shape = " x ".join(map(str, tensor["shape"]))
        lines.append(f"{gb(tensor['bytes']):>10}  {shape} {tensor['dtype']}  {tensor['kind']}  {tensor['line']}")
    alone = f"without generation {gb(answer['training']['reserved'])} reserved"
    lines.append(f"(two steps of one process in {answer['seconds']:.0f} s; {alone})")
    return "\n".join(lines)
