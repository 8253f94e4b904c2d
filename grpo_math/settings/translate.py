"""The names of settings in other programs -> the fields of this program.

A recipe for `trl grpo` or open-r1 runs unchanged. A field that TRL or transformers has removed or renamed is
reported in one line.

Does not check values: recipe.py does, after the translation.
"""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from grpo_math.problems.prompts import AS_IS, PROBLEM
from grpo_math.reading import is_table

SAME = {  # fields of the scripts of TRL and open-r1, which are translated without a message
    "dataset_name": "dataset",
    "dataset_train_split": "dataset_split",
    "dataset_test_split": "eval_split",
    "reward_funcs": "rewards",
    "wandb_project": "project",
    "hub_model_revision": "hub_revision",
}
# A recipe with one of these is for a script.
SCRIPTS = ("dataset_name", "dataset_config", "dataset_prompt_column")
EVALUATES = "has no effect: heldout and eval_n say what is evaluated, and eval_strategy when"
TOGETHER = "has no effect: the rows of a prompt stay together"
NOTHING = "has no effect: no such thing is done here"
# Fields that TRL, transformers or this program has renamed, has removed or never reads, and the message about each.
CHANGED = {
    "torch_dtype": "is now dtype",
    "warmup_ratio": "is now warmup_steps",  # a share if it is below 1
    "evaluation_strategy": "is now eval_strategy",
    "no_cuda": "is now use_cpu",
    "push_to_hub_model_id": "is now hub_model_id",
    "push_to_hub_token": "is now hub_token",
    "vllm_max_model_len": "is now vllm_max_model_length",
    "vllm_guided_decoding_regex": "is now vllm_structured_outputs_regex",
    "update_token_budget": "is now max_tokens_per_micro_batch",
    "use_liger_loss": "is now use_liger_kernel",
    "wandb_log_unique_prompts": "is now log_unique_prompts",
    "max_prompt_length": "has no effect: no prompt is cut; grpo-math doctor names prompts that are too long",
    "overwrite_output_dir": "has no effect: a run in output_dir is continued; name a new folder to start again",
    **dict.fromkeys(("group_by_length", "dispatch_batches", "split_batches"), TOGETHER),
    "save_safetensors": "has no effect: weights are always saved as safetensors",
    "half_precision_backend": "has no effect: set bf16 or fp16",
    "adafactor": "has no effect: set optim: adafactor",
    "logging_dir": "has no effect: set the variable TENSORBOARD_LOGGING_DIR",
    **dict.fromkeys(("vllm_device", "use_mps_device"), "has no effect: the device is found by itself"),
    "vllm_dtype": "has no effect: vLLM takes the dtype of the weights",
    "vllm_enable_prefix_caching": "has no effect: vLLM's prefix cache is on",
    "dataset_streaming": "has no effect: all rows are loaded",
    "wandb_run_group": "has no effect: set WANDB_RUN_GROUP under env",
    "wandb_entity": "has no effect: set the variable WANDB_ENTITY",
    **dict.fromkeys(("ignore_bias_buffers", "include_tokens_per_second", "benchmarks"), NOTHING),
    **dict.fromkeys(("callbacks", "overwrite_hub_revision", "push_to_hub_revision", "system_prompt_column"), NOTHING),
    # Settings of transformers' Trainer that a GRPO run never reads.
    **dict.fromkeys(("do_eval", "do_predict"), EVALUATES),
    **dict.fromkeys(("eval_accumulation_steps", "num_generations_eval", "per_device_eval_batch_size"), EVALUATES),
    **dict.fromkeys(("batch_eval_metrics", "prediction_loss_only", "eval_do_concat_batches"), EVALUATES),
    **dict.fromkeys(("eval_use_gather_object", "include_for_metrics", "bf16_full_eval", "fp16_full_eval"), EVALUATES),
    "heldout_n": "has no effect: give n in heldout, as in [{data: math500, n: 100}]",
    **dict.fromkeys(("label_smoothing_factor", "label_names"), "has no effect: the loss is GRPO's"),
    **dict.fromkeys(("train_sampling_strategy", "length_column_name", "dataloader_drop_last"), TOGETHER),
    "log_multimodal": "has no effect: the problems are text",
    "local_rank": "has no effect: the launcher says which process this is",
}
RENAMED = {name: line.removeprefix("is now ") for name, line in CHANGED.items() if line.startswith("is now ")}
REWARDS = {  # rewards of open-r1 and `trl grpo` -> ours, or TRL's function
    "format": "format_strict",
    "tag_count": "xml_count",
    "repetition_penalty": "repetition",
    "soft_overlong_punishment": "overlong",
    "get_soft_overlong_punishment": "overlong",
    "accuracy_reward": "accuracy",
    "reasoning_accuracy_reward": "trl.rewards:reasoning_accuracy_reward",
    "think_format_reward": "trl.rewards:think_format_reward",
}
# Names in other programs that mean the same as a field, but are spelled differently. Used only for hints.
MEANT = {
    **dict.fromkeys(("model", "model_name", "model_path", "base_model", "model_id"), "model_name_or_path"),
    **dict.fromkeys(("data", "datasets", "dataset_mixture", "train_data", "train_file", "dataset_path"), "dataset"),
    **dict.fromkeys(("lr", "step_size"), "learning_rate"),
    **dict.fromkeys(("lora_rank", "rank", "r"), "lora_r"),
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs"), "num_train_epochs"),
    **dict.fromkeys(("steps", "num_steps", "total_steps", "train_steps", "iterations"), "max_steps"),
    **dict.fromkeys(("batch_size", "train_batch_size", "batch", "prompts"), "prompts_per_step"),
    **dict.fromkeys(("micro_batch_size", "per_device_batch_size", "mini_batch_size"), "per_device_train_batch_size"),
    **dict.fromkeys(("grad_accum", "accumulation_steps", "grad_acc_steps"), "gradient_accumulation_steps"),
    **dict.fromkeys(("group_size", "generations", "rollout_n", "num_samples", "num_rollouts"), "num_generations"),
    **dict.fromkeys(("max_new_tokens", "max_tokens", "max_response_length", "max_length"), "max_completion_length"),
    **dict.fromkeys(("kl_coef", "kl_weight", "kl_beta", "kl_penalty"), "beta"),
    **dict.fromkeys(("clip", "clip_ratio", "clip_range", "cliprange", "clip_eps", "eps_clip"), "epsilon"),
    **dict.fromkeys(("clip_ratio_high", "eps_clip_high"), "epsilon_high"),
    **dict.fromkeys(("reward", "reward_fn", "reward_function", "reward_model_name_or_path"), "rewards"),
    **dict.fromkeys(("output", "out", "out_dir", "run_dir", "save_dir"), "output_dir"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_schedule"), "lr_scheduler_type"),
    **dict.fromkeys(("warmup", "num_warmup_steps"), "warmup_steps"),
    **dict.fromkeys(("optimizer", "optimiser"), "optim"),
    **dict.fromkeys(("lora", "peft"), "use_peft"),
    **dict.fromkeys(("vllm",), "use_vllm"),
    **dict.fromkeys(("qlora", "use_4bit", "quantize"), "load_in_4bit"),
    **dict.fromkeys(("template", "prompt"), "prompt_template"),
    **dict.fromkeys(("loss",), "loss_type"),
    **dict.fromkeys(("grad_clip", "clip_grad", "max_gradient_norm"), "max_grad_norm"),
    **SAME,
    **RENAMED,
}


def hint(name: str, known: Collection[str]) -> str:
    """Return ``did you mean --lora_r?`` for the known name that is nearest in meaning, else in spelling; or "".

    >>> hint("lr", ["learning_rate"]), hint("model_name_or_path", ["model"]), hint("quux", ["seed"])
    ('did you mean --learning_rate?', 'did you mean --model?', '')
    >>> hint("torch_dtyp", ["torch_compile", "dtype"])  # similar to a name that means dtype
    'did you mean --dtype?'
    """
    for word in (name, *difflib.get_close_matches(name, [*known, *MEANT])):
        meant = MEANT.get(word, word)
        for one in known:
            if meant in (one, MEANT.get(one)):
                return f"did you mean --{one}?"
    return ""


def translated(recipe: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return a recipe with our field names, and add a line to ``notes`` for each renamed field or field without effect.

    >>> notes = []
    >>> translated({"torch_dtype": "bfloat16", "max_prompt_length": 512, "reward_funcs": "my.rewards.short"}, notes)
    {'dtype': 'bfloat16', 'rewards': ['my.rewards:short']}
    >>> notes[0]
    'torch_dtype is now dtype: rename the field'
    """
    fields: dict[str, Any] = {}
    for name, value in recipe.items():
        if name in RENAMED:
            notes.append(f"{name} {CHANGED[name]}: rename the field")
        elif name in CHANGED:
            # A field that is switched off loses nothing, so it needs no line.
            if value not in (None, False, "no", "", []):
                notes.append(f"{name}={value} {CHANGED[name]}")
            continue
        if name == "reward_funcs":
            names = map(str, value if isinstance(value, list) else [value])
            # TRL writes package.module.function
            value = [REWARDS.get(one) or (one if ":" in one else ":".join(one.rsplit(".", 1))) for one in names]
        fields[SAME.get(name) or RENAMED.get(name, name)] = value
    return fields


def for_script(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return translated fields with a script's configuration, problem column and prompt in our fields.

    TRL trains on the column ``prompt`` unchanged; open-r1 adds a system prompt.
    """
    ours = dict(fields)
    config, column = ours.pop("dataset_config", None), ours.pop("dataset_prompt_column", None)
    # Only a set on the Hub has configurations. A file has none.
    if config and not is_table(str(ours.get("dataset"))):
        ours["dataset"] = f"{ours.get('dataset')}:{config}"
    if column:
        ours["columns"] = ",".join(filter(None, (ours.get("columns"), f"problem={column}")))
    ours.setdefault("prompt_template", PROBLEM if column or ours.get("system_prompt") else AS_IS)
    return ours
