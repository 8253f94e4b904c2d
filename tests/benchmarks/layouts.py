"""The tables of plans in docs/planning.md and docs/start.md, for a LoRA recipe: `python tests/benchmarks/layouts.py`.

The figures are those of `grpo-math plan`. Does not measure, nor depend on the machine that makes the tables.
"""

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.planner import choose
from grpo_math.settings.recipe import read_recipe

MODELS = [f"Qwen/Qwen2.5-{size}B" for size in ("1.5", "7", "14", "32")]
# The number of GPUs, and the GB of one.
COLUMNS = [(1, 8), (1, 12), (1, 16), (1, 24), (1, 80), *product((2, 4, 8), (24, 80))]
LORA: dict[str, Any] = {
    "dtype": "bfloat16",
    "use_peft": True,
    "lora_r": 16,
    "lora_target_modules": "all-linear",
    "lora_dropout": 0.0,
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "max_completion_length": 1024,
}
QUANTISED = {"load_in_4bit": True, "use_bnb_nested_quant": True}
# Of docs/start.md: models whose measurements are shipped, the GB of a GPU, and the numbers of tokens to try.
BY_CARD = (
    *(f"Qwen/Qwen3-{size}B" for size in ("0.6", "1.7", "4", "8", "14")),
    *("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.1-8B"),
    *("google/gemma-3-1b", "google/gemma-3-4b", "HuggingFaceTB/SmolLM3-3B", "openai/gpt-oss-20b"),
)
CARDS = (8, 12, 16, 24, 48, 80)
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
TOKENS = (16384, 8192, 4096, 2048, 1024, 512)
CONFIGS = {"": None, "z3": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}}


def asleep(prompt: int, share: float) -> dict[str, Any]:
    """vLLM on the policy's GPU, with this share of it, asleep during updates."""
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
    length = prompt + LORA["max_completion_length"]
    return {**vllm, "vllm_max_model_length": length, "vllm_gpu_memory_utilization": share}


def settings(gpus: int) -> list[dict[str, Any]]:
    """The settings to try, fastest first.

    On one GPU: vLLM with the largest share that fits, or with one copy of the base, else generation by transformers.
    On several GPUs a server comes first, so that the policy and vLLM do not share memory.
    """
    sleeping = [asleep(512, share) for share in (0.6, 0.5, 0.4, 0.3, 0.2)]
    server = [{**sleeping[0], "vllm_mode": "server"}] if gpus > 1 else []
    shared = [{**asleep(512, share), "vllm_share_weights": True} for share in SHARES]
    return [*server, *sleeping, *shared, {"use_vllm": False}]


def best(model: str, gpus: int, gpu_gb: int, quantised: bool = False) -> str:
    """A cell: the fastest layout that fits, without DeepSpeed if that is possible, with ZeRO-3 if not.

    >>> [best("Qwen/Qwen2.5-7B", gpus, 80) for gpus in (1, 2, 4, 8)]
    ['c', '1+1', '2+2', '4+4']
    """
    for name, config in CONFIGS.items():
        # One GPU has nothing to split the weights over.
        for change in settings(gpus) if gpus > 1 or not config else ():
            recipe = {**LORA, "prompts_per_step": 16, **change, "model_name_or_path": model}
            recipe |= QUANTISED if quantised else {}
            with suppress(ConfigError):
                _, counted = choose(recipe, {name: config}, gpus=gpus, gpu_gb=gpu_gb, cpu_gb=256)
                if counted.fits:
                    layout = counted.layout
                    split = f" tp{layout.tensor_parallel}" * (layout.tensor_parallel > 1)
                    colocated = "s" if counted.settings["vllm_share_weights"] else "c"
                    short = {
                        "transformers": "t",
                        "colocate": colocated,
                        "server": f"{layout.server}+{layout.policy}{split}",
                    }
                    return f"{short[layout.generation]} {name}".strip()
    return "-"


def longest(model: str, gpu_gb: int, quantised: bool, vllm: bool) -> str:
    """A part of a cell: the most tokens of a completion that fit."""
    recipe = {**read_recipe("gsm8k_8gb"), "model_name_or_path": model, "optim": "adamw_8bit"}
    # Only without an auxiliary loss, a mixture of experts is split by the token budget.
    recipe |= (QUANTISED if quantised else {}) | ({"router_aux_loss_coef": 0.0} if "oss" in model else {})
    for tokens in TOKENS:
        recipe |= {"max_completion_length": tokens, "max_tokens_per_micro_batch": tokens + 512}
        if vllm:
            recipe |= asleep(512, 0.5 if quantised else 0.8)
            recipe |= {"vllm_max_model_length": tokens + 512, "vllm_share_weights": not quantised}
        else:
            recipe["steps_per_generation"] = 1
        with suppress(ConfigError):
            if choose(recipe, {"": None}, gpus=1, gpu_gb=gpu_gb, cpu_gb=32, prompt_tokens=512)[1].fits:
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
    layouts = [
        [model.rpartition("/")[2] + ", 4 bit" * quantised, *(best(model, *column, quantised) for column in COLUMNS)]
        for model, quantised in product(MODELS, (False, True))
    ]
    rows = {
        "layouts": [["model", *(f"{gpus}x{gpu_gb}" for gpus, gpu_gb in COLUMNS)], *layouts],
        "by_card": [["model", *(f"{size} GB" for size in CARDS)], *rows_by_card()],
    }
    return {
        name: "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])
        for name, (head, *body) in rows.items()
    }


if __name__ == "__main__":
    print("\n\n".join(tables().values()))
