"""The groups of docs/settings.md, and the fields that `grpo-math train --help` shows.

Does not contain defaults: the fields state them.
"""

GROUPS = {
    "Data": ["dataset", "columns", "dataset_split", "dataset_limit", "skip_bad_rows"],
    "Prompt": ["prompt_template", "system_prompt", "answer_format"],
    "Tools": ["tools", "python"],
    "Rewards and grading": ["rewards", "grade_timeout"],
    "Batch": ["prompts_per_step", "resample_groups"],
    "Advantage and loss": [*("baseline", "advantage_eps", "surrogate", "kl_estimator", "reference_refresh_steps")],
    "Speed and memory": [
        *("pack_updates", "max_tokens_per_micro_batch"),
        *("activation_offloading", "longest_first", "allow_float16"),
    ],
    "vLLM": ["vllm_sync", "staleness"],
    "Evaluation": [
        *("eval_dataset", "eval_columns", "eval_split", "eval_n", "heldout_every", "heldout"),
        *("keep_best", "stop_at"),
    ],
    "The run": ["resume", "watchdog_minutes", "max_nonfinite_steps"],
}
# Fields that most runs set, with a description that fits into a line of `grpo-math train --help`.
MOST_USED = {
    "Model": {
        "model_name_or_path": "a folder, a Hub id, or 'embedded'",
        "dtype": "of the weights: bfloat16, float32 or auto",
        "use_peft": "train a LoRA adapter instead of all weights",
        "load_in_4bit": "keep the base in 4 bit (QLoRA)",
    },
    "Problems and rewards": {
        "dataset": "a name such as gsm8k, a Hub id, or a file",
        "columns": "which column is which: problem=query,answer=target",
        "prompt_template": "the prompt and its answer format",
        "rewards": "accuracy, format, ... or module:function",
        "eval_n": "held-out problems before and after training; 0: none",
    },
    "Sampling": {
        "num_generations": "completions per prompt: the group size",
        "max_completion_length": "the longest completion, in tokens",
        "temperature": "temperature of the sampling",
        "use_vllm": "generate with vLLM; vllm_mode sets where",
    },
    "Training and output": {
        "prompts_per_step": "prompts per optimizer step",
        "learning_rate": "1e-6 for all weights, about 1e-5 for LoRA",
        "max_steps": "optimizer steps; or num_train_epochs",
        "beta": "the weight of the KL term",
        "output_dir": "the run directory; the same command resumes it",
        "save_steps": "steps between checkpoints",
        "report_to": "wandb, trackio, ... or none",
    },
}


def most_used() -> str:
    """Return the most used fields with their meanings, by group.

    >>> most_used().splitlines()[1:3]
    [' Model', "  --model_name_or_path      a folder, a Hub id, or 'embedded'"]
    """
    lines = ["the most used fields (docs/settings.md and --help-all have all of them):"]
    for group, meanings in MOST_USED.items():
        lines.append(f" {group}")
        lines += [f"  --{name:<23} {meaning}" for name, meaning in meanings.items()]
    return "\n".join(lines)
