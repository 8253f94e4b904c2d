"""`grpo-math plan --calibrate`: measure this machine's GPU, and compare the plan with two steps of the recipe.

train/two_steps.py measures, in a separate process. calibration.py stores the result.
"""

import json
import subprocess
import sys
from contextlib import suppress
from datetime import date
from typing import Any

from grpo_math.errors import ConfigError, UserError
from grpo_math.planner import calibration, memory, seconds
from grpo_math.planner.calibration import Calibration
from grpo_math.planner.plan import choose
from grpo_math.planner.settings import Settings
from grpo_math.run.bar import Bar
from grpo_math.system.gpus import visible_gpus
from grpo_math.system.machine import GB, versions

SECONDS = 90  # of a calibration
# Shares of a card's rates that an uncalibrated plan assumes.
ASSUMED = {"training": seconds.COMPUTE, "generation": seconds.DECODING["transformers"]}


def calibrate(words: list[str], recipe: Settings) -> None:
    """Measure, and store the result. ``words``: the arguments of the recipe."""
    gpus = visible_gpus()
    if not gpus:
        raise ConfigError("calibrate", True, "needs a GPU, and this machine has none", "run it where you will train")
    if gpus[0].used_by:
        raise UserError(f"GPU {gpus[0].number} is in use by {gpus[0].used_by}: calibrate when it is free")
    rates, *steps = _measure(words)
    result = Calibration(date.today().isoformat(), versions()["torch"], **rates)
    for line in steps:
        # The steps ran without vLLM (train/two_steps.py), so the plan to compare with has none.
        without_vllm = {**recipe, "use_vllm": False}
        _, planned = choose(without_vllm, {"": None}, gpus=1, gpu_gb=gpus[0].gb, prompt_tokens=line["prompt"])
        result = _with_steps(result._replace(context=line["context"]), planned, line["phases"])
    calibration.store(result)


def _measure(words: list[str]) -> list[dict[str, Any]]:
    """Return the lines of train/two_steps.py."""
    command = [sys.executable, "-m", "grpo_math.train.two_steps", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for _ in Bar(range(SECONDS), desc="calibrate", unit="s"):
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
            break
    process.kill()
    # The other lines are of packages that print when they are imported.
    lines = [json.loads(line) for line in process.communicate()[0].splitlines() if line.startswith("{")]
    if not lines:
        raise UserError(f"nothing was measured in {SECONDS} seconds: the lines above may say why")
    if len(lines) == 1:
        remedy = "a smaller max_completion_length may do"
        print(
            f"warning: two steps could not be measured in {SECONDS} seconds, only the card: {remedy}", file=sys.stderr
        )
    return lines


def _with_steps(result: Calibration, planned: Any, phases: dict[str, Any]) -> Calibration:
    """Add the shares, the allocator's overhead, and the rows of the table. ``planned``: the uncalibrated plan."""
    machine, settings, batch = planned.machine, planned.settings, planned.batch
    card, rows = result.card(machine.gpu_bytes / GB), []
    fastest = {
        "training": seconds.update_flops(machine, settings, batch, batch.total) / seconds.rate(card, planned.precise),
        "generation": settings["max_completion_length"]
        * seconds.reading_seconds(machine, settings, batch.rollout, card, planned.precise.stream),
    }
    for phase, measured in phases.items():
        terms = planned.phases[phase]
        live = sum(size for term, size in terms.items() if term not in (*memory.OUTSIDE, "fragmentation"))
        low, high = (fastest[phase] / share for share in reversed(ASSUMED[phase]))
        rows.append([f"{phase}, seconds", f"{low:.2g} to {high:.2g}", f"{measured['seconds']:.2g}"])
        pairs = zip(("tensors", "reserved"), (live, live + terms["fragmentation"]), measured["peak"], strict=True)
        rows += [[f"{phase}, GB {kind}", f"{size / GB:.2f}", f"{peak / GB:.2f}"] for kind, size, peak in pairs]
    peaks = [measured["peak"] for measured in phases.values()]
    return result._replace(
        recipe={name: settings[name] for name in calibration.SAME},
        fragmentation=max((reserved / live - 1 for live, reserved in peaks if live), default=None),
        shares={phase: fastest[phase] / measured["seconds"] for phase, measured in phases.items()},
        rows=rows,
    )
