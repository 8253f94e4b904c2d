"""The plan against a simulation of the same recipe, for docs/planning.md: `python tests/benchmarks/simulate.py`.

Every shipped recipe for a GPU with a LoRA, with a LoRA over 4 bit and with all weights, where that fits 80 GB; then a
small recipe for one model of each family of FAMILIES, with a LoRA and with a LoRA over 4 bit. It takes minutes a row;
`--keep FOLDER` holds what is done, and the next run goes on from there. Nothing is measured on a GPU. plans.md has the
results.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu_like.simulated import simulate

from grpo_math.planner import plan, read_recipe
from grpo_math.run.machine import GB

RECIPES = ("gsm8k_8gb", "r1_zero_1.5b_2gpu", "r1_zero_7b_4gpu", "iterative_7b_8gpu", "long_context_8b_qlora")
LORA = {"use_peft": True, "lora_r": 16, "lora_target_modules": "all-linear", "load_in_4bit": False}
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": LORA,
    "4 bit": {**LORA, "load_in_4bit": True, "use_bnb_nested_quant": True},
    "full": {"use_peft": False, "load_in_4bit": False},
}
# One model of each family: the fields of its config.json that differ from transformers' defaults for the family.
FAMILIES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("families.json").read_text("utf-8"))
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


def stateful(name: str) -> bool:
    return bool({"conv", "linear_attention"} & set(FAMILIES[name].get("layer_types", ())))


def of_family(name: str, kind: str, keep: Path) -> dict[str, Any]:
    folder = keep / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(FAMILIES[name]), encoding="utf-8")
    # The simulation's end of generation knows caches of keys and values only. Other models are trained beside a server.
    engine = {"use_vllm": True, "vllm_mode": "server"} if stateful(name) else {}
    return {**SMALL, **KINDS[kind], **engine, "model_name_or_path": str(folder)}


def of_recipe(name: str, kind: str) -> dict[str, Any]:
    """One process on one GPU; an engine that it generates with stands elsewhere."""
    recipe = {**read_recipe(f"launch/configs/{name}.yaml")}
    extra = {"LoRA": recipe.get("use_peft") and not recipe.get("load_in_4bit"), "4 bit": recipe.get("load_in_4bit")}
    if not extra.get(kind):
        recipe |= KINDS[kind]
    if recipe.get("use_vllm"):
        recipe |= {"vllm_mode": "server"}
    for field in ("vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length"):
        recipe.pop(field, None)
    return recipe


def row(name: str, kind: str, keep: Path) -> dict[str, Any] | None:
    recipe = of_family(name, kind, keep) if name in FAMILIES else of_recipe(name, kind)
    file = keep / f"{name}-{kind.replace(' ', '')}.json"
    gpus = 2 if recipe.get("use_vllm") else 1
    counted = plan(recipe, gpus=gpus, gpu_gb=80, cpu_gb=512)
    if not counted["fits"]:
        return None
    if not file.exists():
        path = keep / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        file.write_text(json.dumps(simulate(str(path))), encoding="utf-8")
    return {"name": name, "kind": kind, "plan": counted["phases"], "simulated": json.loads(file.read_text("utf-8"))}


def line(row: dict[str, Any]) -> str:
    """What is live in training and in generation, and what is reserved in the fuller of the two."""
    simulated, cells = row["simulated"], [row["name"], row["kind"]]
    for phase, live in simulated["live"].items():
        terms = {name: n for name, n in row["plan"][phase].items() if name not in ("CUDA_context", "fragmentation")}
        cells += _cells(live, sum(terms.values())) if live else ["", ""]
    fullest = max(_sum(row["plan"][phase]) for phase, live in simulated["live"].items() if live)
    cells += _cells(simulated["reserved"], fullest)
    return f"| {' | '.join(cells)} |"


def _sum(terms: dict[str, int]) -> int:
    return sum(terms.values()) - terms["CUDA_context"]


def _cells(results: int, counted: int) -> list[str]:
    return [f"{results / GB:.2f}", f"{counted / GB:.2f} ({(counted / results - 1) * 100:+.1f}%)"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--only", help="a part of the name of a recipe or a family")
    args = parser.parse_args()
    print("| recipe | trained | live | plan | generation: live | plan | reserved | plan |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        keep = args.keep or Path(folder)
        keep.mkdir(parents=True, exist_ok=True)
        for name in (*RECIPES, *FAMILIES):
            kinds = list(KINDS)
            if name in FAMILIES:
                # The simulation refuses the dtypes of a stateful layer over 4 bit.
                kinds = ["LoRA"] if stateful(name) else ["LoRA", "4 bit"]
            for kind in kinds if not args.only or args.only in name else ():
                if results := row(name, kind, keep):
                    print(line(results), flush=True)


if __name__ == "__main__":
    main()
