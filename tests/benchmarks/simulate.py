"""The plan against a simulation of the same recipe, for docs/scaling.md: `python tests/benchmarks/simulate.py`.

Every shipped recipe for a GPU with a LoRA, with a LoRA over 4 bit and with all weights, where that fits 80 GB; then a
small recipe for one model of each family of FAMILIES, with a LoRA and with a LoRA over 4 bit. It takes minutes a row;
`--only NAME` makes the rows of one recipe or family. Nothing is measured on a GPU. plans.md has the results.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from grpo_math.planner import plan
from grpo_math.settings.recipe import read_recipe
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.machine import GB

PROGRAM = Path(__file__).parents[1] / "gpu_like/simulation/run.py"
RECIPES = ("gsm8k_8gb", "r1_zero_1.5b_2gpu", "r1_zero_7b_4gpu", "iterative_7b_8gpu", "long_context_8b_qlora")
LORA = {"use_peft": True, "lora_r": 16, "lora_target_modules": "all-linear", "load_in_4bit": False}
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": LORA,
    "4 bit": {**LORA, "load_in_4bit": True, "use_bnb_nested_quant": True},
    "full": {"use_peft": False, "load_in_4bit": False},
}
# One model of each family: the fields of its config.json that differ from transformers' defaults for the family.
FAMILIES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("families.json").read_text("utf-8"))
# The simulation's end of generation knows caches of keys and values only. These models are trained beside a server,
# and not over 4 bit, of which the simulation refuses the dtypes.
STATEFUL = ("LFM2-350M", "Qwen3.5-0.8B")
SERVER = {"use_vllm": True, "vllm_mode": "server"}
SMALL = {
    "dtype": "bfloat16",
    "dataset": "gsm8k",
    "prompt_template": "gsm8k",
    "rewards": ["gsm8k"],
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "max_completion_length": 256,
    "lora_dropout": 0.0,
}


def simulate(config: str, *, prompt_tokens: int = 512) -> dict[str, Any]:
    """Bytes that are live and reserved in a simulated run, in a process of its own. Takes ten seconds to minutes."""
    command = [sys.executable, str(PROGRAM), "--config", config, "--prompt-tokens", str(prompt_tokens)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def recipe_of(name: str, kind: str, folder: str) -> dict[str, Any]:
    """One process on one GPU. An engine that it generates with has a GPU of its own."""
    if name in FAMILIES:
        (Path(folder) / "config.json").write_text(json.dumps(FAMILIES[name]), encoding="utf-8")
        return {**SMALL, **KINDS[kind], **(SERVER if name in STATEFUL else {}), "model_name_or_path": folder}
    recipe = {**read_recipe(f"launch/configs/{name}.yaml")}
    if recipe["dtype"] == "auto":  # all weights would be float32
        recipe["dtype"] = "bfloat16"
    if kind != ("4 bit" if recipe.get("load_in_4bit") else "LoRA" if recipe.get("use_peft") else ""):
        recipe |= KINDS[kind]
    if recipe.get("use_vllm"):
        recipe |= SERVER
    shared = ("vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length")
    recipe = {name: value for name, value in recipe.items() if name not in shared}
    return {**recipe, "heldout_every": 0, "eval_n": 0}  # only a training step is simulated


def planned(recipe: dict[str, Any], **options: Any) -> dict[str, int] | None:
    """What the plan says that is live in training and in generation, and reserved in the fuller of the two. None if the
    recipe does not fit 80 GB."""
    engine = bool(recipe.get("use_vllm"))
    answer = plan(RunSettings(recipe), gpus=1 + engine, gpu_gb=80, cpu_gb=512, **options)
    phases = {phase: answer["phases"][phase] for phase in ("training", "generation")[: 2 - engine]}
    counted = {phase: sum(terms.values()) - terms["CUDA_context"] for phase, terms in phases.items()}
    live = {phase: counted[phase] - terms["fragmentation"] for phase, terms in phases.items()}
    return {**live, "reserved": max(counted.values())} if answer["fits"] else None


def row(name: str, kind: str, folder: str) -> str | None:
    """The simulation and the plan."""
    recipe = recipe_of(name, kind, folder)
    if (counted := planned(recipe)) is None:
        return None
    (Path(folder) / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    simulated, cells = simulate(f"{folder}/recipe.yaml"), [name, kind]
    for column, size in {**simulated["live"], "reserved": simulated["reserved"]}.items():
        cells += _cells(size, counted[column]) if column in counted else ["", ""]
    return f"| {' | '.join(cells)} |"


def _cells(simulated: int, counted: int) -> list[str]:
    return [f"{simulated / GB:.2f}", f"{counted / GB:.2f} ({(counted / simulated - 1) * 100:+.1f}%)"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the name of a recipe or a family")
    only = parser.parse_args().only
    print("| recipe | trained | live | plan | generation: live | plan | reserved | plan |")
    print("|---|---|---|---|---|---|---|---|")
    for name in (*RECIPES, *FAMILIES):
        for kind in KINDS if name in RECIPES else ["LoRA"] if name in STATEFUL else ["LoRA", "4 bit"]:
            with tempfile.TemporaryDirectory() as folder:
                if only in name and (line := row(name, kind, folder)):
                    print(line, flush=True)


if __name__ == "__main__":
    main()
