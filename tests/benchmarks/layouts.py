"""The table of plans in docs/start.md, for a LoRA recipe: `python tests/benchmarks/layouts.py`.

The figures are those of `grpo-math plan`. Does not measure, nor depend on the machine that makes the tables.
"""

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.planner import choose
from grpo_math.settings.recipe import read_recipe

QUANTISED = {"load_in_4bit": True, "use_bnb_nested_quant": True}
# Models whose measurements are shipped, the GB of a GPU, and the numbers of tokens to try.
BY_CARD = (
    *(f"Qwen/Qwen3-{size}B" for size in ("1.7", "4", "8")),
    *("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-14B"),
)
CARDS = (8, 12, 16, 24, 48, 80)
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
TOKENS = (16384, 8192, 4096, 2048, 1024, 512)


def asleep(prompt: int, share: float) -> dict[str, Any]:
    """vLLM on the policy's GPU, with this share of it, asleep during updates."""
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
    return {**vllm, "vllm_max_model_length": prompt + 1024, "vllm_gpu_memory_utilization": share}


def longest(model: str, gpu_gb: int, quantised: bool, vllm: bool) -> str:
    """A part of a cell: the most tokens of a completion that fit, and vLLM's share of the GPU."""
    recipe = {**read_recipe("gsm8k_8gb"), "model_name_or_path": model, "optim": "adamw_8bit"}
    recipe |= QUANTISED if quantised else {}
    for tokens in TOKENS:
        sequence = {"max_completion_length": tokens, "max_tokens_per_micro_batch": tokens + 512}
        engines = [{**asleep(512, share), "vllm_max_model_length": tokens + 512} for share in SHARES]
        for engine in engines if vllm else [{"steps_per_generation": 1}]:
            with suppress(ConfigError):
                fields = {**recipe, **sequence, **engine}
                if choose(fields, {"": None}, gpus=1, gpu_gb=gpu_gb, cpu_gb=32, prompt_tokens=512)[1].fits:
                    share = engine.get("vllm_gpu_memory_utilization")
                    return f"{tokens:,}" + (f" ({share:g})" if share else "")
    return "-"


def rows_by_card() -> Iterator[list[str]]:
    """Yield the rows. A cell has one number if it is the same for transformers and vLLM."""
    for model, quantised in product(BY_CARD, (False, True)):
        cells = []
        for size in CARDS:
            alone, shared = (longest(model, size, quantised, vllm) for vllm in (False, True))
            cells.append(shared if shared.startswith(alone) else f"{alone} / {shared}")
        yield [model.rpartition("/")[2] + ", 4 bit" * quantised, *cells]


def tables() -> dict[str, str]:
    """Markdown, by the names of docs/make_tables.py."""
    rows = [["model", *(f"{size} GB" for size in CARDS)], ["---"] * (len(CARDS) + 1), *rows_by_card()]
    return {"by_card": "\n".join(f"| {' | '.join(row)} |" for row in rows)}


if __name__ == "__main__":
    print("\n\n".join(tables().values()))
