"""Shared by the programs of this folder that use a vLLM: settings of a short training on a CPU, and a reward."""

SETTINGS = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 4,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_vllm": True,
}


def vowels(completions, **columns):
    """Dense, so that every group has a signal."""
    return [sum(text[0]["content"].count(letter) for letter in "aeiou") / 10 for text in completions]
