"""The table of layouts: common models on common GPUs, for one LoRA recipe: `python tests/benchmarks/layouts.py`.

A cell is the fastest layout that fits, without DeepSpeed if that is possible, with ZeRO-3 if
not. Does not depend on the machine that makes it.
"""

from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.planner.plan import choose

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


def settings(gpus: int) -> list[dict[str, Any]]:
    """The settings to try, fastest first.

    On one GPU: vLLM on the policy's GPU, asleep during updates, with the largest share that fits, else generation by
    transformers. On several GPUs a server comes first, so that the policy and vLLM do not share memory.
    """
    vllm = {"use_vllm": True, "vllm_max_model_length": PROMPT + RECIPE["max_completion_length"]}
    asleep = {**vllm, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
    sleeping = [{**asleep, "vllm_gpu_memory_utilization": share} for share in (0.6, 0.5, 0.4, 0.3, 0.2)]
    server = [{**vllm, "vllm_mode": "server"}] if gpus > 1 else []
    return [*server, *sleeping, {"use_vllm": False}]


def best(model: str, gpus: int, gpu_gb: int) -> str:
    """A cell: the fastest layout that fits.

    >>> [best("Qwen/Qwen2.5-7B", gpus, 80) for gpus in (1, 2, 4, 8)]
    ['c', '1+1', '2+2', '4+4']
    """
    for name, config in CONFIGS.items():
        # One GPU has nothing to split the weights over.
        for change in settings(gpus) if gpus > 1 or not config else ():
            recipe = {**RECIPE, **change, "model_name_or_path": model}
            try:
                _, counted = choose(recipe, {name: config}, gpus=gpus, gpu_gb=gpu_gb, cpu_gb=MAIN_MEMORY)
            except ConfigError:
                continue
            layout = counted.layout
            if counted.fits:
                server = f"{layout.server}+{layout.policy}" + f" tp{layout.tensor_parallel}" * (
                    layout.tensor_parallel > 1
                )
                return f"{SHORT.get(layout.generation, server)} {name}".strip()
    return "-"


def table() -> str:
    """Markdown: a row for each model, a column for each number of GPUs and their memory."""
    columns = [(gpus, gpu_gb) for gpus in GPUS for gpu_gb in MEMORY]
    head = ["model", *(f"{gpus}x{gpu_gb}" for gpus, gpu_gb in columns)]
    rows = [[model.rpartition("/")[2], *(best(model, *column) for column in columns)] for model in MODELS]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    print(table())
