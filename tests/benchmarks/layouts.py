"""The table of layouts: common models on common GPUs, for one LoRA recipe: `python tests/benchmarks/layouts.py`.

A cell is the fastest layout of `devices.recommend` that fits, without DeepSpeed if that is possible, with ZeRO-3 if
not. Does not depend on the machine that makes it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError
from grpo_math.planner import devices
from grpo_math.planner.plan import Counted, choose

MODELS = tuple(f"Qwen/Qwen2.5-{size}B" for size in ("1.5", "7", "14", "32"))
GPUS = (1, 2, 4, 8)
MEMORY = (8, 24, 80)  # GB of a GPU
MAIN_MEMORY = 256
PROMPT = 512
RECIPE: dict[str, Any] = {
    "dtype": "bfloat16",
    "use_peft": True,
    "lora_r": 16,
    "lora_target_modules": "all-linear",
    "lora_dropout": 0.0,
    "prompts_per_step": 16,
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "max_completion_length": 1024,
}
CONFIGS = {"": None, "z3": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}}
SHORT = {"transformers": "t", "colocate": "c"}


class Cell(NamedTuple):
    """What suits ``gpus`` GPUs of ``gpu_gb`` GB; ``counted`` is None where nothing fits."""

    model: str
    gpus: int
    gpu_gb: int
    config: str
    counted: Counted | None

    @property
    def column(self) -> str:
        return f"{self.gpus}x{self.gpu_gb}"

    @property
    def text(self) -> str:
        name = self.counted.layout.name if self.counted else "-"
        return f"{SHORT.get(name, name)} {self.config}".strip()


def cells(model: str) -> Iterator[Cell]:
    """One row of the table."""
    return (best(model, gpus, gpu_gb) for gpus in GPUS for gpu_gb in MEMORY)


def best(model: str, gpus: int, gpu_gb: int) -> Cell:
    """The fastest layout that fits.

    >>> [best("Qwen/Qwen2.5-7B", gpus, 80).text for gpus in (1, 2, 4, 8)]
    ['c', '1+1', '2+2', '4+4']
    """
    for name, config in CONFIGS.items():
        if config and gpus == 1:
            continue  # nothing to split the weights over
        for change in devices.recommend(gpus, PROMPT + RECIPE["max_completion_length"]):
            recipe = {**RECIPE, **change, "model_name_or_path": model}
            try:
                _, counted = choose(recipe, {name: config}, gpus=gpus, gpu_gb=gpu_gb, cpu_gb=MAIN_MEMORY)
            except ConfigError:
                continue
            if counted.fits:
                return Cell(model, gpus, gpu_gb, name, counted)
    return Cell(model, gpus, gpu_gb, "", None)


def table() -> str:
    """Markdown: a row for each model, a column for each number of GPUs and their memory."""
    head = ["model", *(cell.column for cell in cells(MODELS[0]))]
    rows = [[model.rpartition("/")[2], *(cell.text for cell in cells(model))] for model in MODELS]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    print(table())
