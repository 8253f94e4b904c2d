"""What a recipe alone shows: settings without effect, the batch's arithmetic, an adapter's settings.

Does not look at the machine, the data or the network.
"""

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from grpo_math.checks import machine
from grpo_math.checks.setup import Said, Setup
from grpo_math.errors import ConfigError, UserError, one_of
from grpo_math.generation.server import RANKS
from grpo_math.planner import activations
from grpo_math.settings import batch
from grpo_math.settings.accelerate import deepspeed_config
from grpo_math.settings.fields import fields as all_fields


def batch_arithmetic(setup: Setup) -> Iterator[Said]:
    """Prompts x completions come out even over processes and steps, and there are problems for a step."""
    found = batch.plan(setup.settings, setup.given, setup.processes)
    yield Said("info", found.line("process"), "", found._asdict())
    found.refuse_few(len(setup.rows), "dataset", setup.settings["dataset"])


LEAVE = "leave it out"
# Settings of transformers' Trainer that a GRPO run never reads, and what it reads instead.
NEVER_READ = {
    "eval_n and heldout_every say what is evaluated": (
        *("do_eval", "do_predict", "eval_on_start", "eval_steps", "eval_delay", "eval_accumulation_steps"),
        *("num_generations_eval", "per_device_eval_batch_size", "batch_eval_metrics", "prediction_loss_only"),
        *("eval_do_concat_batches", "eval_use_gather_object", "include_for_metrics"),
        *("bf16_full_eval", "fp16_full_eval", "metric_for_best_model", "greater_is_better"),
    ),
    "the loss is GRPO's": ("label_smoothing_factor", "label_names"),
    "the rows of a prompt stay together": ("train_sampling_strategy", "length_column_name", "dataloader_drop_last"),
    "the problems are text": ("log_multimodal",),
    "the launcher says which process this is": ("local_rank",),
}
COLOCATED = ("vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_model_impl")
GENERATES = ("cache_implementation", "use_transformers_continuous_batching", "use_transformers_paged")
WORKERS = ("persistent_workers", "prefetch_factor", "multiprocessing_context", "in_order")
TRACKIO = ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id")
SWITCHED = {
    "use_peft": ("lora_", "use_dora", "use_rslora"),
    "use_vllm": ("vllm_",),
    "use_liger_kernel": ("liger_kernel_config",),
    "use_transformers_continuous_batching": ("transformers_continuous_batching_config",),
    "log_completions": ("num_completions_to_print", "log_unique_prompts"),
}
SAME = (  # an old name of transformers' or TRL's, and the new one
    ("gradient_checkpointing", "activation_checkpointing"),
    ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
    ("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"),
    ("use_transformers_paged", "use_transformers_continuous_batching"),
)


def _ignored(s: Mapping[str, Any]) -> Iterator[tuple[Iterable[str], str, str]]:
    """Settings that must be left at their defaults beside these others, why, and what to do instead."""
    for why, names in NEVER_READ.items():
        yield names, f"would be ignored: {why}", LEAVE
    if s["use_vllm"] and s["vllm_mode"] == "server":
        yield COLOCATED, "would be ignored: vllm_mode is server", "give it to the server"
    if not s["tools"]:
        yield ["max_tool_calling_iterations", "python"], "would be ignored without tools", "set tools: [python]"
    elif "python" not in s["tools"]:
        yield ["python"], "would be ignored: the tool python is not among tools", "add it, or leave this out"
    if s["use_vllm"]:
        yield GENERATES, "would be ignored: use_vllm=True generates", LEAVE
    if not s["dataloader_num_workers"]:
        yield (f"dataloader_{x}" for x in WORKERS), "needs dataloader_num_workers above 0", f"set that too, or {LEAVE}"
    if s["use_peft"]:
        why = "cannot work with use_peft: TRL keeps no second model beside an adapter"
        yield ["sync_ref_model"], why, "use reference_refresh_steps"
    if str(s["dataset"]).endswith((".jsonl", ".json")):
        why = "would be ignored: all rows of a file are trained on"
        yield ["dataset_split"], why, f"{LEAVE}, or give the file of that split"
    if not s["eval_dataset"]:
        yield ["eval_columns"], "would be ignored without eval_dataset", LEAVE
    trackers = set(s["report_to"] if isinstance(s["report_to"], list) else [s["report_to"]])
    if trackers.isdisjoint(("all", "wandb", "trackio")):
        yield ["project"], "would be ignored without report_to: wandb or trackio", LEAVE
    if trackers.isdisjoint(("all", "trackio")):
        yield TRACKIO, "would be ignored without report_to: trackio", LEAVE
    if s["fsdp_config"] and not s["fsdp"]:
        yield ["fsdp_config"], "would be ignored without fsdp", LEAVE
    if s["optim_target_modules"] and not s["optim"].startswith(("galore", "apollo")):
        yield ["optim_target_modules"], f"would be ignored by optim={s['optim']}", LEAVE


def without_effect(setup: Setup) -> Iterator[Said]:
    """No setting is stated that would be ignored because of another one, or because training never reads it."""
    s, fields = setup.settings, all_fields()
    changed = {name for name in setup.given if s[name] != fields[name].default}
    for switch, prefixes in SWITCHED.items():
        stated = sorted(name for name in changed if name.startswith(prefixes))
        on = s[switch] or (switch == "use_transformers_continuous_batching" and s["use_transformers_paged"])
        if stated and not on and switch in setup.given:  # switched off on purpose
            yield Said("info", f"{', '.join(stated)}: no effect with {switch}=False", f"set {switch}: true")
        elif stated and not on:
            why = f"would be ignored without {switch}"
            raise ConfigError(stated[0], s[stated[0]], why, f"set {switch}: true, or leave it out")
    yield from (Said("warning", said, remedy) for said, remedy in _outdone(setup))
    for old, new in SAME:
        if {old, new} <= setup.given and s[old] != s[new]:
            raise ConfigError(new, s[new], f"contradicts {old}={s[old]}, its old name", "leave one of them out")
    if "do_train" in setup.given and not s["do_train"]:
        raise ConfigError("do_train", s["do_train"], "would be ignored: this trains", "use grpo-math evaluate")
    for names, why, remedy in _ignored(s):
        if name := next((name for name in names if name in changed), None):
            raise ConfigError(name, s[name], why, remedy)


def _outdone(setup: Setup) -> Iterator[tuple[str, str]]:
    """What has no effect, or not the one that is meant, and does no harm either; and what to set."""
    s, given, steps = setup.settings, setup.given, setup.settings["max_steps"] or 0
    if "num_train_epochs" in given and steps > 0:
        said = f"num_train_epochs={s['num_train_epochs']:g} has no effect: max_steps={steps} ends the run"
        yield said, "max_steps: -1"
    if s["save_strategy"] == "no" and "save_steps" in given:
        yield f"save_steps={s['save_steps']:g} has no effect with save_strategy='no'", "save_strategy: steps"
    if s["eval_dataset"] and s["eval_n"] == 0 and not s["heldout_every"]:
        yield f"eval_dataset={s['eval_dataset']!r} has no effect", "set eval_n, or heldout_every"
    if steps > 0 and "logging_steps" in given and s["logging_steps"] > steps:
        yield f"logging_steps={s['logging_steps']:g} of max_steps={steps}: the history stays empty", "logging_steps: 1"
    if steps > 0 and (s["warmup_steps"] or 0) >= steps and s["lr_scheduler_type"] != "constant":
        said = f"warmup_steps={s['warmup_steps']:g} of max_steps={steps}: the learning rate is never reached"
        yield said, f"warmup_steps: {steps // 10}"


def whole_distribution(setup: Setup) -> Iterator[Said]:
    """vLLM samples from the whole distribution, where its log-probs correct the loss."""
    s = setup.settings
    cuts = [
        f"{name}={s[name]}" for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)) if (s[name] or off) != off
    ]
    if not (cuts and s["use_vllm"] and s["vllm_importance_sampling_correction"]):
        return
    least = f", down to {s['top_p']:g}" if s["top_p"] < 1 else ""
    said = (
        f"{', '.join(cuts)}: vLLM's log-probs are of the tokens that it keeps, the trainer's of all, so the ratio that "
        f"corrects the loss is too small, a token's by the share that is cut off{least}, a completion's by the product"
    )
    yield Said("warning", said, f"leave out {', '.join(cut.partition('=')[0] for cut in cuts)}")


def deepspeed_file(setup: Setup) -> Iterator[Said]:
    """DeepSpeed's file is there, and JSON; it, FSDP and a backend have several processes, or a launcher."""
    s = setup.settings
    deepspeed_config(s, None)
    if os.environ.get("RANK") or setup.processes > 1 or setup.accelerate or len(machine.capabilities()) > 1:
        return
    for name in ("fsdp", "ddp_backend", "deepspeed"):
        if s[name] and not (name == "deepspeed" and importlib.util.find_spec("mpi4py")):
            reason = "needs processes that a launcher has started"
            raise ConfigError(name, s[name], reason, "add --accelerate_config, or leave it out")
    yield from ()


def adapter(setup: Setup) -> Iterator[Said]:
    """The adapter's modules exist, vLLM can serve it, and dropout does not meet a KL term."""
    s = setup.settings
    if not s["use_peft"]:
        return
    if s["use_vllm"] and s.get("vllm_sync") == "adapter":
        for name in ("use_dora", "lora_modules_to_save", "lora_target_parameters"):
            if s[name]:
                raise ConfigError(name, s[name], "cannot be served by vLLM as an adapter", "set vllm_sync to merged")
        if s["lora_r"] > RANKS[-1]:
            raise ConfigError("lora_r", s["lora_r"], "is more than vLLM serves", f"use {RANKS[-1]} or less")
    if s["lora_task_type"] != "CAUSAL_LM":
        reason = "is not a task of a model that writes"
        raise ConfigError("lora_task_type", s["lora_task_type"], reason, "leave it at CAUSAL_LM")
    if s["beta"] and s["lora_dropout"]:
        said = f"lora_dropout={s['lora_dropout']} with beta={s['beta']}: the KL takes in the noise of the dropout"
        yield Said("warning", said, "lora_dropout: 0.0")
    if s["lora_alpha"] > 8 * s["lora_r"]:
        said = f"lora_alpha={s['lora_alpha']} scales the adapter by {s['lora_alpha'] / s['lora_r']:g}"
        yield Said("warning", said, f"lora_alpha: {2 * s['lora_r']}")
    wanted, kept = s["lora_target_modules"], s["lora_modules_to_save"] or []
    if wanted == []:
        raise ConfigError("lora_target_modules", wanted, "is empty", "leave it out, or use all-linear")
    if wanted and len(wanted) == 1:
        try:
            re.compile(wanted[0])
        except re.error as error:
            reason = f"is not a regular expression ({error})"
            raise ConfigError("lora_target_modules", wanted[0], reason, "use all-linear") from None
    try:
        shape = setup.shape
    except UserError as error:
        yield Said("info", f"whether the adapter's modules exist is not checked: {error}", "see the model's layers")
        return
    linears = [linear.name for linear in shape.linears()]
    largest = max(max(linear.n_in, linear.n_out) for linear in shape.linears())
    if s["lora_r"] > largest:
        reason = f"is more than the {largest} of the model's largest map, and would add nothing"
        raise ConfigError("lora_r", s["lora_r"], reason, "use 8 to 64")
    targeted = set(linears) if wanted == ["all-linear"] else set(wanted or ())
    for name in s["lora_target_parameters"] or []:
        if not set(name.split(".")) & set(linears):
            reason = "matches no parameter of a layer"
            raise ConfigError("lora_target_parameters", name, reason, f"name one such as {linears[0]}.weight")
        if set(name.split(".")) & targeted:
            reason = "is of a map that lora_target_modules has too"
            raise ConfigError("lora_target_parameters", name, reason, "leave it out of one of them")
    if wanted and len(wanted) == 1 and wanted[0] in linears:
        reason = "is one name, which TRL takes as an expression for a module's whole path"
        raise ConfigError("lora_target_modules", wanted, reason, f'write ".*{wanted[0]}"')
    for name in kept:
        one_of("lora_modules_to_save", name, ("embed_tokens", "lm_head", "norm", *linears))
    activations.targets(shape, s)
