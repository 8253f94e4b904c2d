"""`grpo-math plan`: does a recipe fit these GPUs?"""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from grpo_math import planner
from grpo_math.errors import ConfigError
from grpo_math.planner import calibrate, calibration
from grpo_math.settings.accelerate import accelerate_config, shipped_configs
from grpo_math.settings.recipe import read
from grpo_math.system.streams import Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", metavar="RECIPE", required=True, help="a file, or the name of a shipped recipe")
    add("--gpus", type=int, metavar="N", help="number of GPUs (default: this machine's)")
    add("--gpu_memory", type=float, metavar="GB", help="memory of one GPU (default: this machine's)")
    add(
        "--card",
        help="the GPU, for its memory, number formats and speed: h100, l4, t4, 4090, 3060, ... or GB,TFLOP/s,GB/s, "
        "such as 80,989,3350",
    )
    add("--cpu_memory", type=float, metavar="GB", help="main memory (default: this machine's)")
    add("--prompt_tokens", type=int, metavar="N", help="the longest prompt (default: 512)")
    add(
        "--calibrate",
        action="store_true",
        help="measure this machine's GPU and two steps of the recipe, within 90 seconds; later plans use the result",
    )
    add("--accelerate_config", metavar="FILE", help="a file or a name (default: as train chooses)")


def run(args: argparse.Namespace) -> Answer:
    """Plan the memory and the layout of one recipe."""
    for name in ("gpus", "gpu_memory", "cpu_memory", "prompt_tokens"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 1e6:
            remedy = "describe the hardware, for example --gpus 1 --gpu_memory 24"
            raise ConfigError(name, value, "is out of range", remedy)
    card = planner.card_of(args.card) if args.card else None
    asked = read(["--config", args.config, *args.fields])
    for note in asked.notes:
        print(f"warning: {note}", file=sys.stderr)
    for line in asked.replaced:
        print(line, file=sys.stderr)
    recipe = asked.sound().explicit_values()
    name, elsewhere = args.accelerate_config, bool(card or args.gpu_memory)
    if args.calibrate:
        if elsewhere:
            raise ConfigError("calibrate", True, "measures this machine's GPU", "leave out --card and --gpu_memory")
        calibrate.calibrate(["--config", args.config, *args.fields], recipe)
    known = None if elsewhere else calibration.stored()
    answer = planner.plan(
        recipe,
        # Training tries the same configs in the same order (train/layout.py).
        {"": accelerate_config(name)} if name else shipped_configs(recipe),
        card,
        # A named card need not be in this machine, so the GPUs of this machine do not count.
        gpus=args.gpus or (1 if card else None),
        gpu_gb=args.gpu_memory or (card.gb if card else None),
        cpu_gb=args.cpu_memory,
        capability=card.capability if card else None,
        prompt_tokens=args.prompt_tokens,
        calibration=known,
    )
    answer |= {"calibration": known._asdict()} if known else {}
    answer["command"] = _command(args, answer) if answer["best"] else None
    answer["extras"] = _extras(recipe, answer) if answer["best"] else []
    return Answer(answer, planner.picture(answer), answer["fits"])


def _extras(recipe: Mapping[str, Any], answer: dict[str, Any]) -> list[str]:
    """Return the extras of this package that the line to paste needs."""
    s = {**recipe, **{name: value for one in answer["suggestions"] for name, value in one["change"].items()}}
    needs = {
        "quant": s.get("load_in_4bit") or "8bit" in s.get("optim", ""),
        "vllm": s.get("use_vllm") and s.get("vllm_mode") == "colocate",
        "deepspeed": "zero" in (answer["best"]["accelerate_config"] or ""),
    }
    return [name for name, needed in needs.items() if needed]


def _command(args: argparse.Namespace, answer: dict[str, Any]) -> str:
    """Return the line that trains the recipe with the suggested changes."""
    fields = {name: value for one in answer["suggestions"] for name, value in one["change"].items()}
    config = args.accelerate_config or answer["best"]["accelerate_config"]
    options = [*(["--gpus", str(args.gpus)] if args.gpus else []), *(["--accelerate_config", config] if config else [])]
    words = [
        word
        for name, value in fields.items()
        for word in (f"--{name}", value if isinstance(value, str) else json.dumps(value))
    ]
    return shlex.join(["grpo-math", "train", "--config", args.config, *args.fields, *words, *options])
