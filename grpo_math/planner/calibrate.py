"""`grpo-math plan --calibrate`: measure this machine's GPU, and compare the plan with two steps of the recipe.

on_gpu.py measures, in a separate process of at most `SECONDS`. calibration.py stores the result.
"""

import json
import os
import subprocess
import sys
from datetime import date
from typing import Any

from grpo_math.errors import ConfigError, UserError
from grpo_math.planner import calibration, memory, seconds
from grpo_math.planner.calibration import Calibration
from grpo_math.planner.plan import choose
from grpo_math.planner.settings import Settings
from grpo_math.settings.vllm import starts_server
from grpo_math.system.gpus import visible_gpus
from grpo_math.system.machine import GB, versions

SECONDS = 90


def calibrate(words: list[str], recipe: Settings, prompt_tokens: int | None) -> None:
    """Measure and store. ``words``: the arguments of the recipe."""
    gpus = visible_gpus()
    if not gpus:
        raise ConfigError("calibrate", True, "needs a GPU, and this machine has none", "run it where you will train")
    if gpus[0].used_by:
        raise UserError(f"GPU {gpus[0].number} is in use by {gpus[0].used_by}: calibrate when it is free")
    # As on_gpu.py runs the recipe: one process, and without a second plan for DeepSpeed.
    _, planned = choose(
        recipe, {"": None}, gpus=1 + starts_server(recipe), gpu_gb=gpus[0].gb, prompt_tokens=prompt_tokens
    )
    rates, *after = _measure([str(planned.machine.prompt), *words], grows=planned.layout.generation != "colocate")
    found = Calibration(str(date.today()), versions()["torch"], **rates)
    for line in after:
        found = _with_steps(found._replace(context=line["context"]), planned, line["steps"])
    calibration.store(found)


def _measure(arguments: list[str], grows: bool) -> list[dict[str, Any]]:
    """Return what on_gpu.py prints. ``grows``: the allocator's segments grow, as in training."""
    variables = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "HF_HUB_OFFLINE": "1"}
    variables |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if grows else {}
    command = [sys.executable, "-m", "grpo_math.planner.on_gpu", *arguments]
    try:
        printed = subprocess.run(
            command, stdout=subprocess.PIPE, timeout=SECONDS, env={**variables, **os.environ}
        ).stdout
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
    # Some packages print when they are imported.
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith(b"{")]
    if not lines:
        raise UserError(f"nothing could be measured within {SECONDS} seconds: the lines above may say why")
    if len(lines) == 1:
        print("warning: only the card was measured, and no step of the recipe", file=sys.stderr)
    return lines


def _with_steps(found: Calibration, planned: Any, steps: dict[str, Any]) -> Calibration:
    """Add the shares, the allocator's overhead, and the rows of the table. ``planned``: the uncalibrated plan."""
    machine, settings, precise, rows = planned.machine, planned.settings, planned.precise, []
    card, length = found.card(machine.gpu_bytes / GB), settings["max_completion_length"]
    shares: dict[str, float] = {}
    for phase, measured in steps.items():
        tokens = measured["tokens"]
        if phase == "training":
            flops = seconds.update_flops(machine, settings, planned.batch, tokens / length)
            fastest, assumed = flops / seconds.rate(card, precise), seconds.COMPUTE
        else:
            shorter = {**settings, "max_completion_length": tokens}
            each = seconds.reading_seconds(machine, shorter, planned.batch.rollout, card, precise.stream)
            fastest, assumed = tokens * each, seconds.DECODING["transformers"]
        shares[phase] = fastest / measured["seconds"]
        low, high = (fastest / share for share in reversed(assumed))
        rows.append([f"{phase} of {tokens} tokens", f"{low:.2g} to {high:.2g} s", f"{measured['seconds']:.2g} s"])
        # The plan counts completions of full length.
        if phase == "training" or tokens == length:
            terms = planned.phases[phase]
            live = sum(size for term, size in terms.items() if term not in (*memory.OUTSIDE, "fragmentation"))
            pairs = zip(("live", "reserved"), (live, live + terms["fragmentation"]), measured["peak"], strict=True)
            rows += [[f"{phase}, {kind}", f"{a / GB:.2f} GB", f"{b / GB:.2f} GB"] for kind, a, b in pairs]
    peaks = [measured["peak"] for measured in steps.values()]
    return found._replace(
        recipe={name: settings[name] for name in calibration.SAME},
        compute=shares["training"],
        decoding=shares.get("generation"),
        fragmentation=max((reserved / live - 1 for live, reserved in peaks if live), default=None),
        rows=rows,
    )
