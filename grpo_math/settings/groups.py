"""The fields that are ours, by what they are about: docs/settings.md and `grpo-math train --help` show them so.

Does not hold their defaults or meanings: those stand with the fields.
"""

import textwrap

from grpo_math.settings.fields import fields

GROUPS = {
    "Data": ["dataset", "columns", "dataset_split", "dataset_limit", "skip_bad_rows"],
    "Prompt": ["prompt_template", "system_prompt", "answer_format"],
    "Tools": ["tools", "python"],
    "Rewards and grading": ["rewards", "grade_timeout"],
    "Batch": ["prompts_per_step", "resample_groups"],
    "Difficulty": ["difficulty_band", "curriculum", "difficulty_samples", "difficulty_file"],
    "Advantage and loss": [*("baseline", "advantage_eps", "surrogate", "kl_estimator", "reference_refresh_steps")],
    "Speed and memory": [
        *("pack_updates", "update_token_budget", "max_seq_length_train", "long_sequences"),
        *("activation_offloading", "longest_first", "allow_float16"),
    ],
    "vLLM": ["vllm_sync", "staleness"],
    "Evaluation": ["eval_dataset", "eval_columns", "eval_split", "eval_n", "heldout_every", "heldout_n"],
    "The run": ["resume", "watchdog_minutes", "max_nonfinite_steps"],
}
THEIRS = {  # of TRL's and transformers' 300, what most runs set
    "Model": ["model_name_or_path", "dtype", "use_peft", "lora_r", "lora_alpha", "load_in_4bit"],
    "Sampling": ["num_generations", "max_completion_length", "temperature", "use_vllm", "vllm_mode"],
    "Training": ["learning_rate", "max_steps", "num_train_epochs", "beta", "epsilon", "loss_type", "scale_rewards"],
    "Output": ["output_dir", "save_steps", "report_to", "seed", "push_to_hub"],
}


def screen(width: int = 100) -> str:
    """Our fields and the most used of TRL's, with their defaults, on one screen.

    >>> [line for line in screen().splitlines() if line.startswith("  Batch")]
    ['  Batch                prompts_per_step=0, resample_groups=0']
    """
    every = fields()
    lines = []
    for title, groups in (("Ours:", GROUPS), ("TRL's, most used:", THEIRS)):
        lines.append(title)
        for group, names in groups.items():
            words = ", ".join(_stated(name, every[name].default) for name in names)
            first, further = f"  {group:<20} ", " " * 23
            lines += textwrap.wrap(words, width, initial_indent=first, subsequent_indent=further)
    return "\n".join(lines)


def _stated(name: str, default: object) -> str:
    value = ",".join(map(str, default)) if isinstance(default, list) else default
    return name if value is None or value == "" else f"{name}={str(value).lower() if value in (True, False) else value}"
