"""What fits a GPU of 8 GB, by plan: the table of docs/planning.md. `python tests/benchmarks/plan_8gb.py`.

Nothing is measured here: these are the figures of `grpo-math plan`.
"""

from grpo_math.planner import plan
from grpo_math.run.machine import GB

MODELS = ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-3B-Instruct")
PROMPT, COMPLETION = 256, 1024  # tokens
SHARES = (0.6, 0.5, 0.4, 0.3)  # of the GPU for vLLM; the first that fits, as `grpo-math plan` suggests it
GROUP = 8  # completions of a prompt


def recipe(model: str, quantised: bool, share: float | None) -> dict[str, object]:
    """A LoRA on all linear maps, one group a micro-batch that is cut to one completion at a time."""
    engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
    length = {"vllm_max_model_length": PROMPT + COMPLETION, "vllm_gpu_memory_utilization": share}
    return {
        "model_name_or_path": model,
        "dtype": "bfloat16",
        "use_peft": True,
        "lora_r": 16,
        "lora_dropout": 0.0,
        "lora_target_modules": "all-linear",
        "optim": "adamw_8bit",
        "num_generations": GROUP,
        "per_device_train_batch_size": GROUP,
        "gradient_accumulation_steps": 8,
        "max_completion_length": COMPLETION,
        "max_tokens_per_micro_batch": PROMPT + COMPLETION,
        "load_in_4bit": quantised,
        "use_bnb_nested_quant": quantised,
        **({} if share is None else engine | length),
    }


def cell(model: str, quantised: bool, beside: bool) -> str:
    """GB of the two phases, in brackets where they do not fit; beside vLLM, at the largest of `SHARES` that fits."""
    for share in SHARES if beside else (None,):
        answer = plan(recipe(model, quantised, share), gpus=1, gpu_gb=8, cpu_gb=32, prompt_tokens=PROMPT)
        training, generation = (sum(answer["phases"][phase].values()) / GB for phase in ("training", "generation"))
        if answer["fits"]:
            return f"{training:.1f} / {generation:.1f}" + (f" at {share:g}" if beside else "")
    return f"({training:.1f} / {generation:.1f})"


def table() -> str:
    lines = ["| model | base | transformers generates | colocated vLLM, asleep in an update |", "|---|---|---|---|"]
    for model in MODELS:
        for quantised in (False, True):
            cells = [cell(model, quantised, beside) for beside in (False, True)]
            base = "4 bit" if quantised else "bfloat16"
            lines.append(f"| {model.split('/')[1]} | {base} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
