"""The changes that make a recipe fit: a ladder of settings, in the order of what they cost the user.

`climb` goes up the ladder until the plan fits, and then takes back what is not needed. memory_plan.py decides whether a
plan fits.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any

from grpo_math.generation.dtypes import corrections, has_bfloat16
from grpo_math.planner.memory_plan import MemoryPlan
from grpo_math.planner.settings import Json, Settings
from grpo_math.planner.work import splits
from grpo_math.settings import batch
from grpo_math.system.machine import GB

SHORTEST = 256  # tokens of a completion that is suggested
# Fields that change nothing on a CPU.
GPU_FIELDS = {"dtype", "bf16", "activation_offloading", "optim", "load_in_4bit", "vllm_share_weights"}
ADAPTER = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0}
LAST = ("offload", "adapter", "prompts", "completions")  # rungs at which a climb may end
CONFIG, SHARE = "accelerate_config", "vllm_gpu_memory_utilization"
Configs = Mapping[str, Settings | None]  # accelerate configs by name
Changes = dict[str, Json]  # recipe fields by the name of a rung; a later one overrides an earlier one


def suggest(plan: MemoryPlan, configs: Configs) -> Json:
    """Return {"suggestions": changes that make a recipe fit, "best": their plan, "lacking": what is missing if all
    changes together do not fit}.

    ``configs``: the accelerate configs that may be used in place of the plan's own. ``saves_gb`` is the drop of the
    peak after the changes before it.
    """
    if plan.fits:
        return {"suggestions": [], "best": None, "lacking": []}
    changes, best = climb(plan, configs)
    if not best.fits:
        return {"suggestions": [], "best": None, "lacking": best.problems}
    # A field is named in the change that gives it its last value, if the recipe has another value. Fields that follow
    # from the GPU's number formats are always named: without an explicit ``bf16``, training would choose again.
    last = {**_merged(changes), SHARE: best.settings[SHARE]}
    unset = changes["forced"].keys() - plan.explicit
    of_recipe = {name: value for name, value in plan.settings.items() if name not in unset}
    config = last.pop(CONFIG)
    chosen = [
        {name: last[name] for name, value in change.items() if last.get(name) == value != of_recipe.get(name)}
        for change in ({**changes, "share": {SHARE: last[SHARE]}}).values()
    ]
    chosen = [change for change in chosen if change]
    before = accumulate(chosen[:-1], lambda done, change: {**done, **change}, initial={CONFIG: config})
    plans = [*(changed(plan, configs, {"": done}) or plan for done in before), best]
    suggestions = [
        {
            "set": [f"{k}: {v if isinstance(v, str) else json.dumps(v)}" for k, v in change.items()],
            "change": change,
            "saves_gb": round((before.peak - after.peak) / GB, 3),
            "fits": after.fits,
        }
        for change, (before, after) in zip(chosen, pairwise(plans), strict=True)
    ]
    return {"suggestions": suggestions, "best": {**best.answer(), CONFIG: config or None}, "lacking": []}


def climb(plan: MemoryPlan, configs: Configs) -> tuple[Changes, MemoryPlan]:
    """Return the cheapest changes that make a plan fit, and the plan with them. If nothing fits, return the nearest.

    A start is an accelerate config and what generates, those of the recipe first. Up: each rung gets its strongest
    value that brings the plan no further from fitting. Down: each rung, the dearest first, is left out or gets the
    mildest value that still fits. What is learned changes only if no start fits without it.
    """
    # A GPU without bfloat16 leaves no choice, and neither do the positions that the model has.
    forced = dict(corrections(plan.settings, plan.machine.capability, plan.machine.family))
    length = (plan.machine.shape.max_tokens or plan.sequence) - plan.machine.prompt
    if SHORTEST <= length < plan.settings["max_completion_length"]:
        forced["max_completion_length"] = length
    starts: list[Changes] = [
        {"forced": forced, "config": {CONFIG: config}, "generation": generation}
        for generation in ({}, *_other_generation(plan.settings))
        for config in ("", *configs)
    ]
    nearest: tuple[Changes, MemoryPlan] = ({}, plan)
    for last, start in product(LAST, starts):
        if (now := tuned(plan, configs, start)) is None:
            continue
        changes, rungs = start, ladder(now)
        for name in [*rungs][: [*rungs].index(last) + 1]:
            for value in reversed(rungs[name]):
                higher = {**changes, name: value}
                if (then := tuned(plan, configs, higher)) and then.severity <= now.severity:
                    changes, now = higher, then
                    break
        for name in reversed([*changes][len(start) :]) if now.fits else ():
            without = {known: change for known, change in changes.items() if known != name}
            milder = rungs[name][: rungs[name].index(changes[name])]
            for lower in (without, *({**changes, name: value} for value in milder)):
                if (then := tuned(plan, configs, lower)) and then.fits:
                    changes, now = lower, then
                    break
        nearest = min((changes, now), nearest, key=lambda entry: entry[1].severity)
        if now.fits:
            break
    return nearest


def _other_generation(settings: Settings) -> list[Json]:
    # transformers keeps the keys and values of all rows. vLLM computes as many rows at a time as its cache takes.
    other = {"use_vllm": False} if settings["use_vllm"] else {"use_vllm": True, "vllm_mode": "colocate"}
    return [] if settings["use_cpu"] else [other]


def tuned(plan: MemoryPlan, configs: Configs, changes: Changes) -> MemoryPlan | None:
    """Return `changed`. If it does not fit, a colocated vLLM gets the share of the GPU that the policy leaves."""
    then = changed(plan, configs, changes)
    if then and not then.fits and then.layout.generation == "colocate":
        shared = {**changes, "share": {SHARE: then.vllm_share()}}
        if (better := changed(plan, configs, shared)) and better.severity < then.severity:
            return better
    return then


def changed(plan: MemoryPlan, configs: Configs, changes: Changes) -> MemoryPlan | None:
    """Return the plan with changes, or None if that cannot be planned or trained."""
    fields, machine = _merged(changes), plan.machine
    if name := fields.pop(CONFIG, None):
        # Measuring takes seconds, so the plans of other configs use only existing measurements.
        measured: Any = partial(machine.shape.measured, measures=False)  # type: ignore[call-arg]
        machine = machine._replace(accelerate=configs[name], shape=replace(machine.shape, measured=measured))
    return plan.changed(fields, machine)


def _merged(changes: Changes) -> Json:
    return {name: value for change in changes.values() for name, value in change.items()}


def ladder(plan: MemoryPlan) -> dict[str, list[Json]]:
    """Return the values of each rung, the mildest first. The first rungs are free, the next cost speed, and those after
    "offload" change what is learned.

    A value is recipe fields.
    """
    s = plan.settings
    name = "prompts_per_step" if s["prompts_per_step"] else "gradient_accumulation_steps"
    # Frozen weights lose almost no accuracy in 16 bit. Without bfloat16, ``auto`` is float16.
    with_float16 = {"dtype": "auto"} if s["fp16"] else {}
    half = {"dtype": "bfloat16"} if has_bfloat16(plan.machine.capability) else with_float16
    share, quantised, nested = {"vllm_share_weights": True}, {"load_in_4bit": True}, {"use_bnb_nested_quant": True}
    rungs: dict[str, list[Json]] = {
        "dtype": [half] if s["use_peft"] else [],
        "context": [{"vllm_max_model_length": plan.sequence}] if s["use_vllm"] else [],
        "dropout": [{"lora_dropout": 0.0}],
        "micro_batch": [*_micro_batches(plan)],
        "checkpointing": [{"gradient_checkpointing": True}],
        "sleep": [{"vllm_enable_sleep_mode": True}] if s["use_vllm"] else [],
        "optimizer": [{"optim": "adamw_8bit"}],
        "rollout": [{"steps_per_generation": steps} for steps in batch.divisors(plan.batch.steps)[-2::-1]],
        "base": [share, quantised, quantised | nested, quantised | nested | share],
        # The processes of a group share the weights of one engine.
        "tensor_parallel": [{"vllm_tensor_parallel_size": n} for n in _engines(plan)],
        "offload": [{"activation_offloading": True}],
        "adapter": [] if s["use_peft"] else [fields | half for fields in (ADAPTER, ADAPTER | quantised | nested)],
        "prompts": [{name: n} for n in batch.divisors(s["prompts_per_step"] or plan.batch.steps)[-2::-1]],
        "completions": [*_completions(plan)],
    }
    skipped = GPU_FIELDS if s["use_cpu"] else set()
    return {
        rung: [value for value in values if not skipped & value.keys() and {**s, **value} != {**s}]
        for rung, values in rungs.items()
    }


def _engines(plan: MemoryPlan) -> list[int]:
    """Return the tensor parallel sizes that a colocated vLLM can be given."""
    if plan.layout.generation != "colocate":
        return []
    return [n for n in batch.divisors(plan.machine.gpus) if plan.machine.shape.heads % n == 0]


def _completions(plan: MemoryPlan) -> Iterator[Json]:
    """Yield shorter completions. For vLLM each comes with the recipe's context, and with the shortest possible one."""
    settings, prompt = plan.settings, plan.machine.prompt
    for length in (settings["max_completion_length"] // 2**k for k in range(1, 16)):
        if length >= SHORTEST:
            yield {"max_completion_length": length, "vllm_max_model_length": settings["vllm_max_model_length"]}
            if settings["use_vllm"]:
                yield {"max_completion_length": length, "vllm_max_model_length": prompt + length}


def _micro_batches(plan: MemoryPlan) -> Iterator[Json]:
    """Yield changes that make micro-batches smaller: rows if a loss term needs whole micro-batches, else tokens."""
    rows, settings = plan.batch.rows, plan.settings
    if not splits(settings):
        for n in batch.divisors(rows)[1:]:
            # With prompts_per_step the number of steps is solved.
            steps = {} if settings["prompts_per_step"] else {"gradient_accumulation_steps": plan.batch.steps * n}
            yield {"per_device_train_batch_size": rows // n, **steps}
        return
    tokens = settings["max_tokens_per_micro_batch"] or rows * plan.sequence
    # Layers whose memory is not linear in their tokens are measured at each size, which takes seconds.
    factor = 2 if plan.machine.shape.linear else 4
    # A completion stays whole, so a budget below the shortest sequence saves nothing.
    least = min(plan.sequence, plan.machine.prompt + SHORTEST)
    while tokens > least:
        tokens = max(tokens // factor, least)
        yield {"max_tokens_per_micro_batch": tokens}
