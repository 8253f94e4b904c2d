"""Measure the shipped models anew, after a change of planner/measure.py: `python tests/benchmarks/measurements.py`.

Writes grpo_math/planner/measured.json: the shapes of the models of shapes.json, the memory of `MODELS` under common
settings, and what the shipped recipes and the stored plans of the tests ask for. Ten minutes on a core; the cache
folder holds what is done.
"""

import json
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from grpo_math.errors import UserError
from grpo_math.packing.row_plan import MAX_TILES
from grpo_math.planner import model, plan
from grpo_math.planner.memory import Precision, measurement_settings
from grpo_math.planner.settings import resolve
from grpo_math.settings.accelerate import shipped_configs
from grpo_math.settings.recipe import read_recipe
from grpo_math.settings.run_settings import RunSettings

HALF, FOUR_BIT, ZERO = Precision(2, 4, True), Precision(2, 2, True), Precision(2, 2, False)
FULL = Precision(4, 4, True)
LORA: dict[str, Any] = {"dtype": "bfloat16", "use_peft": True, "lora_target_modules": "all-linear"}
QUANTISED = {"load_in_4bit": True, "use_bnb_nested_quant": True}
MODELS = (
    *("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-3B", "meta-llama/Llama-3.1-8B"),
    *("Qwen/Qwen2.5-14B", "Qwen/Qwen2.5-32B", "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B"),
    *("Qwen/Qwen3-1.7B", "meta-llama/Llama-3.2-1B", "HuggingFaceTB/SmolLM2-1.7B"),
)
COMMON: list[tuple[dict[str, Any], Precision]] = [
    ({**LORA, "lora_dropout": 0.0}, HALF),
    ({**LORA, "lora_dropout": 0.0, **QUANTISED}, FOUR_BIT),
    ({**LORA, "lora_dropout": 0.05}, HALF),
    ({**LORA, "lora_dropout": 0.0}, FULL),
    # A GPU without bfloat16: float32 without autocast.
    ({**LORA, "lora_dropout": 0.0}, Precision(4, 4, False)),
    ({**LORA, "lora_dropout": 0.0, **QUANTISED}, Precision(4, 2, False)),
    ({**LORA, "lora_dropout": 0.0}, ZERO),
    ({}, HALF),
    ({}, FULL),
    ({}, ZERO),
]


# With the number of tiles of the MLP.
SETTINGS = [(fields, precise, tiles) for (fields, precise), tiles in product(COMMON, range(1, MAX_TILES + 1))]
SETTINGS += [({**fields, "gradient_checkpointing": False}, precise, 1) for fields, precise in COMMON]


def main() -> None:
    import layouts

    kept: dict[str, dict[str, Any]] = {}
    plain, configs = model.measured, model.stored("shapes.json")

    def measured(source: str, config: dict[str, Any], how: dict[str, Any] | None, measures: bool = True) -> Any:
        return kept.setdefault(model.measurement_key(config, how), plain(source, config, how))

    model.measured = measured
    model.stored = {"shapes.json": configs, "measured.json": {}}.__getitem__
    shapes = {name: model.model_shape(name, config) for name, config in configs.items()}
    for name in MODELS:
        for fields, precise, tiles in SETTINGS:
            if tiles == 1 or shapes[name].tiled:
                shapes[name].measured(measurement_settings(shapes[name], resolve(RunSettings(fields)), precise, tiles))
    for name, (fields, precise), tiles in product(layouts.BY_CARD, COMMON[:2], range(1, MAX_TILES + 1)):
        if shapes[name].linear and (tiles == 1 or shapes[name].tiled):
            shapes[name].measured(measurement_settings(shapes[name], resolve(RunSettings(fields)), precise, tiles))
    both = (True, False)
    for peft, maps, checkpoints, cpu, dropout in product(both, (None, "all-linear"), both, both, (0.0, 0.05)):
        fields = {"use_peft": peft, "lora_target_modules": maps, "gradient_checkpointing": checkpoints}
        extra = resolve(RunSettings({**fields, "lora_dropout": dropout, "use_cpu": cpu}))
        precisions = (Precision(4, 4, False), FULL) if cpu else (FULL,)
        for tiles, precise in product(range(1, MAX_TILES + 1 if checkpoints else 2), precisions):
            shapes["embedded"].measured(measurement_settings(shapes["embedded"], extra, precise, tiles))
    for recipe in sorted(Path("launch/configs").glob("*.yaml")):
        for gpus, memory_gb in product((1, 2, 4, 8), (8, 24, 80)):
            with suppress(UserError):
                settings = RunSettings(read_recipe(recipe))
                plan(settings, gpus=gpus, gpu_gb=memory_gb, configs=shipped_configs(settings))
    layouts.tables()
    lines = [f"{json.dumps(key)}: {json.dumps(answer, separators=(',', ':'))}" for key, answer in sorted(kept.items())]
    Path("grpo_math/planner/measured.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
