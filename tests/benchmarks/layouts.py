"""The table of plans in docs/start.md, for a LoRA recipe: `python tests/benchmarks/layouts.py`.

The figures are those of `grpo-math plan`. Does not measure, nor depend on the machine that makes the tables.
"""

from collections.abc import Iterator
from contextlib import suppress
from itertools import product

from grpo_math.errors import ConfigError
from grpo_math.planner import choose
from grpo_math.settings.recipe import read_recipe
from grpo_math.settings.run_settings import RunSettings

QUANTISED = {"load_in_4bit": True, "use_bnb_nested_quant": True}
# Models whose measurements are shipped, the GB of a GPU, and the numbers of tokens to try.
BY_CARD = (
    *(f"Qwen/Qwen3-{size}B" for size in ("0.6", "1.7", "4", "8", "14")),
    *("meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.1-8B", "google/gemma-3-4b", "openai/gpt-oss-20b"),
)
CARDS = (8, 12, 16, 24, 48, 80)
TOKENS = (16384, 8192, 4096, 2048, 1024, 512)
VLLM = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_enable_sleep_mode": True,
    "vllm_share_weights": True,
    "vllm_gpu_memory_utilization": 0.8,
}


def longest(model: str, gpu_gb: int, quantised: bool, vllm: bool) -> str:
    """A part of a cell: the most tokens of a completion that fit."""
    recipe = {**read_recipe("gsm8k_8gb"), "model_name_or_path": model, "optim": "adamw_8bit"}
    # Only without an auxiliary loss, a mixture of experts is split by the token budget.
    recipe |= (QUANTISED if quantised else {}) | ({"router_aux_loss_coef": 0.0} if "oss" in model else {})
    for tokens in TOKENS:
        recipe |= {"max_completion_length": tokens, "max_tokens_per_micro_batch": tokens + 512}
        if vllm:
            recipe |= {**VLLM, "vllm_max_model_length": tokens + 512}
        else:
            recipe["steps_per_generation"] = 1
        with suppress(ConfigError):
            if choose(RunSettings(recipe), {"": None}, gpus=1, gpu_gb=gpu_gb, cpu_gb=32, prompt_tokens=512)[1].fits:
                return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)
    return "-"


def rows_by_card() -> Iterator[list[str]]:
    """Yield the rows. A cell has one number if it is the same for transformers and vLLM."""
    for model, quantised in product(BY_CARD, (False, True)):
        # bitsandbytes does not quantise stacked experts.
        if not (quantised and "oss" in model):
            cells = [[longest(model, size, quantised, vllm) for vllm in (False, True)] for size in CARDS]
            yield [model.rpartition("/")[2] + ", 4 bit" * quantised, *("/".join(dict.fromkeys(cell)) for cell in cells)]


def tables() -> dict[str, str]:
    """Markdown, by the names of docs/make_tables.py."""
    rows = [["model", *(f"{size} GB" for size in CARDS)], ["---"] * (len(CARDS) + 1), *rows_by_card()]
    return {"by_card": "\n".join(f"|{'|'.join(row)}|" for row in rows)}


if __name__ == "__main__":
    print("\n\n".join(tables().values()))
