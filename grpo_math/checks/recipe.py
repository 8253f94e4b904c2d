"""What a recipe alone shows: settings without effect, the batch's arithmetic, an adapter's settings.

Does not look at the machine, the data or the network.
"""

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from grpo_math.checks import machine
from grpo_math.checks.setup import Said, Setup, refuse, warnings
from grpo_math.errors import ConfigError, UserError, one_of
from grpo_math.generation.server import RANKS
from grpo_math.planner.model import Shape, targets
from grpo_math.reading import is_table
from grpo_math.settings import batch
from grpo_math.settings.accelerate import deepspeed_config
from grpo_math.settings.fields import fields as all_fields
from grpo_math.settings.translate import NEVER_READ
from grpo_math.trainer.ranges import hard_clamp


def batch_arithmetic(setup: Setup) -> Iterator[Said]:
    """Prompts x completions come out even over processes and steps, and there are problems for a step."""
    found = batch.plan(setup.settings, setup.given, setup.processes)
    yield Said("info", found.line("process"))
    found.refuse_few(len(setup.problems.rows), "dataset", setup.settings["dataset"])


LEAVE = "leave it out"
UNSERVED = ("use_dora", "lora_modules_to_save", "lora_target_parameters")
COLOCATED = ("vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_model_impl")
GENERATES = ("cache_implementation", "use_transformers_continuous_batching", "use_transformers_paged")
WORKERS = ("persistent_workers", "prefetch_factor", "multiprocessing_context", "in_order")
CALLS = ("max_tool_calling_iterations", "python")
PROJECTS = {"all", "wandb", "trackio"}
TRACKIO = ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id")
SWITCHED = {
    "use_peft": ("lora_", "use_dora", "use_rslora"),
    "use_vllm": ("vllm_",),
    "load_in_4bit": ("bnb_4bit_", "use_bnb_"),
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
    """Settings that must be left at their defaults next to these others, the reason, and what to do instead."""
    trackers = {*(s["report_to"] if isinstance(s["report_to"], list) else [s["report_to"]])}
    server = s["use_vllm"] and s["vllm_mode"] == "server"
    workers = [f"dataloader_{name}" for name in WORKERS]
    rules = [
        (True, [name], line.replace("has no effect", "would be ignored"), LEAVE) for name, line in NEVER_READ.items()
    ] + [
        (server, COLOCATED, "would be ignored: vllm_mode is server", "give it to the server"),
        (not s["tools"], CALLS, "would be ignored without tools", "set tools: [python]"),
        (
            "python" not in (s["tools"] or ["python"]),
            ["python"],
            "would be ignored: the tool python is not among tools",
            "add it, or leave this out",
        ),
        (s["use_vllm"], GENERATES, "would be ignored: use_vllm=True generates", LEAVE),
        (
            not s["dataloader_num_workers"],
            workers,
            "needs dataloader_num_workers above 0",
            f"set that too, or {LEAVE}",
        ),
        (
            s["use_peft"],
            ["sync_ref_model"],
            "cannot work with use_peft: TRL keeps no second model beside an adapter",
            "use reference_refresh_steps",
        ),
        (
            is_table(s["dataset"]) and "[" not in s["dataset_split"],
            ["dataset_split"],
            "would be ignored: a file has one split",
            f"{LEAVE}, or cut the file: train[200:]",
        ),
        (not s["eval_dataset"], ["eval_columns"], "would be ignored without eval_dataset", LEAVE),
        (not trackers & PROJECTS, ["project"], "would be ignored without report_to: wandb or trackio", LEAVE),
        (not trackers & {"all", "trackio"}, TRACKIO, "would be ignored without report_to: trackio", LEAVE),
        (not s["fsdp"], ["fsdp_config"], "would be ignored without fsdp", LEAVE),
        (
            not s["optim"].startswith(("galore", "apollo")),
            ["optim_target_modules"],
            f"would be ignored by optim={s['optim']}",
            LEAVE,
        ),
    ]  # fmt: skip
    yield from ((names, reason, remedy) for holds, names, reason, remedy in rules if holds)


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
    yield from warnings(_outdone(s, setup.given))
    if clamped := hard_clamp(s):
        yield Said("warning", *clamped)
    for old, new in SAME:
        if {old, new} <= setup.given and s[old] != s[new]:
            raise ConfigError(new, s[new], f"contradicts {old}={s[old]}, its old name", "leave one of them out")
    if "do_train" in setup.given and not s["do_train"]:
        raise ConfigError("do_train", s["do_train"], "would be ignored: this trains", "use grpo-math evaluate")
    for names, why, remedy in _ignored(s):
        if name := next((name for name in names if name in changed), None):
            raise ConfigError(name, s[name], why, remedy)


def _outdone(s: Mapping[str, Any], given: set[str]) -> list[tuple[Any, str, str]]:
    """Settings that have no effect, or not the one that is meant, and do no harm either; and what to set."""
    steps = s["max_steps"] or 0
    warmup, logs = (s["warmup_steps"] or 0), s["logging_steps"]
    return [
        (
            "num_train_epochs" in given and steps > 0,
            f"num_train_epochs={s['num_train_epochs']:g} has no effect: max_steps={steps} ends the run",
            "max_steps: -1",
        ),
        (
            s["save_strategy"] == "no" and "save_steps" in given,
            f"save_steps={s['save_steps']:g} has no effect with save_strategy='no'",
            "save_strategy: steps",
        ),
        (
            s["eval_dataset"] and s["eval_n"] == 0 and not s["heldout_every"],
            f"eval_dataset={s['eval_dataset']!r} has no effect",
            "set eval_n, or heldout_every",
        ),
        (
            "logging_steps" in given and 0 < steps < logs,
            f"logging_steps={logs:g} of max_steps={steps}: the history stays empty",
            "logging_steps: 1",
        ),
        (
            0 < steps <= warmup and s["lr_scheduler_type"] != "constant",
            f"warmup_steps={warmup:g} of max_steps={steps}: the learning rate is never reached",
            f"warmup_steps: {steps // 10}",
        ),
    ]


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
    served = s["use_vllm"] and s["vllm_sync"] == "adapter"
    apart = "cannot be served by vLLM as an adapter"
    modules, rank = s["lora_target_modules"], s["lora_r"]
    refuse(
        s,
        [
            *((served and s[name], name, apart, "set vllm_sync to merged") for name in UNSERVED),
            (served and rank > RANKS[-1], "lora_r", "is more than vLLM serves", f"use {RANKS[-1]} or less"),
            (
                s["lora_task_type"] != "CAUSAL_LM",
                "lora_task_type",
                "is not a task of a model that writes",
                "leave it at CAUSAL_LM",
            ),
            (modules == [], "lora_target_modules", "is empty", "leave it out, or use all-linear"),
        ],
    )
    yield from warnings(
        [
            (
                s["beta"] and s["lora_dropout"],
                f"lora_dropout={s['lora_dropout']} with beta={s['beta']}: the KL takes in the noise of the dropout",
                "lora_dropout: 0.0",
            ),
            (
                s["lora_alpha"] > 8 * rank,
                f"lora_alpha={s['lora_alpha']} scales the adapter by {s['lora_alpha'] / rank:g}",
                f"lora_alpha: {2 * rank}",
            ),
        ]
    )
    if modules and len(modules) == 1:
        try:
            re.compile(modules[0])
        except re.error as error:
            reason = f"is not a regular expression ({error})"
            raise ConfigError("lora_target_modules", modules[0], reason, "use all-linear") from None
    try:
        shape = setup.shape
    except UserError as error:
        yield Said("info", f"whether the adapter's modules exist is not checked: {error}", "see the model's layers")
        return
    _check_modules(s, shape)
    targets(shape, s)


def _check_modules(s: Mapping[str, Any], shape: Shape) -> None:
    """The adapter's modules and parameters are those of a layer, and each is named once."""
    linears = [linear.name for linear in shape.linears]
    largest = max(max(linear.n_in, linear.n_out) for linear in shape.linears)
    modules = s["lora_target_modules"] or []
    alone = len(modules) == 1 and modules[0] in linears
    small = f"is more than the {largest} of the model's largest map, and would add nothing"
    one_name = "is one name, which TRL takes as an expression for a module's whole path"
    refuse(
        s,
        [
            (s["lora_r"] > largest, "lora_r", small, "use 8 to 64"),
            (alone, "lora_target_modules", one_name, f'write ".*{modules[0] if alone else ""}"'),
        ],
    )
    targeted = set(linears) if modules == ["all-linear"] else set(modules)
    for name in s["lora_target_parameters"] or []:
        remedy = f"name one such as {linears[0]}.weight"
        if not set(name.split(".")) & set(linears):
            raise ConfigError("lora_target_parameters", name, "matches no parameter of a layer", remedy)
        if set(name.split(".")) & targeted:
            reason = "is of a map that lora_target_modules has too"
            raise ConfigError("lora_target_parameters", name, reason, "leave it out of one of them")
    for name in s["lora_modules_to_save"] or []:
        one_of("lora_modules_to_save", name, ("embed_tokens", "lm_head", "norm", *linears))
