"""The changes that make a recipe fit: a table of remedies, in the order of what they cost the user.

A new remedy is a row of `REMEDIES`. `climb` takes remedies until the plan fits, and then takes back what is not needed.
memory_plan.py decides whether a plan fits.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

from grpo_math.generation.dtypes import corrections, has_bfloat16
from grpo_math.planner.memory_plan import MARGIN, MemoryPlan
from grpo_math.planner.settings import Json, LaunchSettings
from grpo_math.planner.work import splits
from grpo_math.settings import batch
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.machine import GB

SHORTEST = 256  # tokens of a completion that is suggested
CONFIG, SHARE = "accelerate_config", "vllm_gpu_memory_utilization"
Configs = Mapping[str, LaunchSettings | None]  # accelerate configs by name
Changes = dict[str, Json]  # recipe fields by the name of a remedy; a later one overrides an earlier one


class Remedy(NamedTuple):
    """A way to need less memory.

    ``changes``: recipe fields for a plan, the mildest first. ``gpu_only``: a CPU gains nothing. ``learns_differently``:
    the changes affect what is learned. Such a remedy is tried only if all earlier ones together do not suffice.
    """

    name: str
    changes: Callable[[MemoryPlan], Iterable[Json]]
    gpu_only: bool = False
    learns_differently: bool = False

    def values(self, plan: MemoryPlan) -> list[Json]:
        """Return the changes that have an effect."""
        if self.gpu_only and plan.settings.use_cpu:
            return []
        before = plan.settings
        return [one for one in self.changes(plan) if any(getattr(before, name) != new for name, new in one.items())]


def _half(plan: MemoryPlan) -> Json:
    """Return the fields of weights in 16 bit. Without bfloat16, ``auto`` is float16."""
    if has_bfloat16(plan.machine.capability):
        return {"dtype": "bfloat16"}
    return {"dtype": "auto"} if plan.settings.fp16 else {}


def _fewer(number: int) -> list[int]:
    """Return the divisors below a number, the largest first."""
    return batch.divisors(number)[-2::-1]


def _engines(plan: MemoryPlan) -> list[Json]:
    """Return the tensor parallel sizes that a colocated vLLM can be given."""
    if plan.layout.generation != "colocate":
        return []
    sizes = (n for n in batch.divisors(plan.machine.gpus) if plan.machine.shape.heads % n == 0)
    return [{"vllm_tensor_parallel_size": n} for n in sizes]


def _adapters(plan: MemoryPlan) -> list[Json]:
    """Return an adapter in place of all weights, on a base in 16 and in 4 bit."""
    fields = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0}
    return [] if plan.settings.use_peft else [fields | _half(plan), fields | QUANTISED | NESTED | _half(plan)]


def _fewer_prompts(plan: MemoryPlan) -> list[Json]:
    prompts = plan.settings.prompts_per_step
    name = "prompts_per_step" if prompts else "gradient_accumulation_steps"
    return [{name: n} for n in _fewer(prompts or plan.batch.steps)]


def _completions(plan: MemoryPlan) -> Iterator[Json]:
    """Yield shorter completions. For vLLM each comes with the recipe's context, and with the shortest possible one."""
    settings, prompt = plan.settings, plan.machine.prompt
    for length in (settings.max_completion_length // 2**k for k in range(1, 16)):
        if length >= SHORTEST:
            yield {"max_completion_length": length, "vllm_max_model_length": settings.vllm_max_model_length}
            if settings.use_vllm:
                yield {"max_completion_length": length, "vllm_max_model_length": prompt + length}


def _micro_batches(plan: MemoryPlan) -> Iterator[Json]:
    """Yield changes that make micro-batches smaller: rows if a loss term needs whole micro-batches, else tokens."""
    rows, settings = plan.batch.rows, plan.settings
    if not splits(settings):
        for n in batch.divisors(rows)[1:]:
            # With prompts_per_step the number of steps is solved.
            steps = {} if settings.prompts_per_step else {"gradient_accumulation_steps": plan.batch.steps * n}
            yield {"per_device_train_batch_size": rows // n, **steps}
        return
    tokens = settings.max_tokens_per_micro_batch or rows * plan.sequence
    # Layers whose memory is not linear in their tokens are measured at each size, which takes seconds.
    factor = 2 if plan.machine.shape.linear else 4
    # A completion stays whole, so a budget below the shortest sequence saves nothing.
    least = min(plan.sequence, plan.machine.prompt + SHORTEST)
    while tokens > least:
        tokens = max(tokens // factor, least)
        yield {"max_tokens_per_micro_batch": tokens}


ONE_COPY: Json = {"vllm_share_weights": True}
QUANTISED: Json = {"load_in_4bit": True}
NESTED: Json = {"use_bnb_nested_quant": True}
# Settings that a run with free memory turns off, the slowest first.
SLOWER = ("activation_offloading", "gradient_checkpointing", "load_in_4bit")
# The cheapest for the user first.
REMEDIES = (
    # Frozen weights lose almost no accuracy in 16 bit.
    Remedy("dtype", lambda plan: [_half(plan)] if plan.settings.use_peft else [], gpu_only=True),
    # vLLM must have room for one sequence of its context, which is the model's by default.
    Remedy("context", lambda plan: [{"vllm_max_model_length": plan.sequence}] if plan.settings.use_vllm else []),
    # With dropout, each row of a prefill contains its prompt.
    Remedy("dropout", lambda plan: [{"lora_dropout": 0.0}]),
    # Smaller passes keep the gradient. A GPU is less busy.
    Remedy("micro_batch", _micro_batches),
    # From here, the run is slower. Layers are computed twice.
    Remedy("checkpointing", lambda plan: [{"gradient_checkpointing": True}]),
    # vLLM wakes up for each rollout.
    Remedy("sleep", lambda plan: [{"vllm_enable_sleep_mode": True}] if plan.settings.use_vllm else []),
    # The moments have 8 bit.
    Remedy("optimizer", lambda plan: [{"optim": "adamw_8bit"}], gpu_only=True),
    # Fewer rows share a read of the weights.
    Remedy("rollout", lambda plan: [{"steps_per_generation": n} for n in _fewer(plan.batch.steps)]),
    # Policy and vLLM share the base, or the base is dequantised for each product.
    Remedy(
        "base", lambda plan: [ONE_COPY, QUANTISED, QUANTISED | NESTED, QUANTISED | NESTED | ONE_COPY], gpu_only=True
    ),
    # The processes of a group share the weights of one engine.
    Remedy("tensor_parallel", _engines),
    # The inputs of layers wait in main memory.
    Remedy("offload", lambda plan: [{"activation_offloading": True}], gpu_only=True),
    # From here, the run learns differently. Only an adapter is trained.
    Remedy("adapter", _adapters, gpu_only=True, learns_differently=True),
    # The gradient is noisier.
    Remedy("prompts", _fewer_prompts, learns_differently=True),
    # Answers are shorter.
    Remedy("completions", _completions, learns_differently=True),
)


def faster(plan: MemoryPlan, factor: float) -> Json | None:
    """Return the first change that makes updates faster and still fits, or None. It uses the memory that is left.

    ``factor``: the measured memory as a share of the planned memory.
    """
    settings, sequence = plan.settings, plan.sequence
    tokens = settings.max_tokens_per_micro_batch or plan.batch.rows * sequence
    step = plan.batch.rows * plan.batch.steps * sequence
    changes: list[Json] = [{name: False} for name in SLOWER if getattr(settings, name)]
    changes += [{"max_tokens_per_micro_batch": tokens * times} for times in (16, 8, 4, 2) if tokens * times <= step]
    for change in changes:
        then = plan.changed(change, plan.machine)
        if then and then.fits and then.peak * max(1.0, factor) <= MARGIN * plan.machine.gpu_bytes:
            return change
    return None


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
    last = {**_merged(changes), SHARE: best.settings.vllm_gpu_memory_utilization}
    unset = changes["forced"].keys() - plan.settings.explicit
    of_recipe = {name: value for name, value in plan.settings.values().items() if name not in unset}
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


class Reached(NamedTuple):
    """Changes of a recipe, and the plan with them."""

    changes: Changes
    plan: MemoryPlan


Tune = Callable[[Changes], MemoryPlan | None]


def climb(plan: MemoryPlan, configs: Configs) -> Reached:
    """Return the cheapest changes that make a plan fit. If nothing fits, return the nearest plan.

    A start is an accelerate config and what generates, those of the recipe first. From each start the climb goes up,
    until the plan fits, and then down, to what is needed for that. The first start that fits wins. The training itself
    changes only if no start fits without.
    """
    tune: Tune = partial(tuned, plan, configs)
    stages = [*(REMEDIES[:n] for n, remedy in enumerate(REMEDIES) if remedy.learns_differently), REMEDIES]
    nearest = Reached({}, plan)
    for remedies, start in product(stages, _starts(plan, configs)):
        if (at_start := tune(start)) is None:
            continue
        values = {remedy.name: remedy.values(at_start) for remedy in remedies}
        reached = _up(tune, Reached(start, at_start), values)
        if reached.plan.fits:
            return _down(tune, reached, values)
        nearest = min(reached, nearest, key=lambda one: one.plan.severity)
    return nearest


def _starts(plan: MemoryPlan, configs: Configs) -> list[Changes]:
    # A GPU without bfloat16 leaves no choice, and neither do the positions that the model has.
    forced = dict(corrections(plan.settings, plan.machine.capability, plan.machine.family))
    length = (plan.machine.shape.max_tokens or plan.sequence) - plan.machine.prompt
    if SHORTEST <= length < plan.settings.max_completion_length:
        forced["max_completion_length"] = length
    return [
        {"forced": forced, "config": {CONFIG: config}, "generation": generation}
        for generation in ({}, *_other_generation(plan.settings))
        for config in ("", *configs)
    ]


def _up(tune: Tune, reached: Reached, values: Mapping[str, list[Json]]) -> Reached:
    """Give each remedy, the cheapest first, its strongest value that brings the plan no further from fitting."""
    for name, mild_to_strong in values.items():
        severity = reached.plan.severity
        higher = [{**reached.changes, name: value} for value in reversed(mild_to_strong)]
        reached = _first(tune, higher, lambda plan, most=severity: plan.severity <= most) or reached
    return reached


def _down(tune: Tune, reached: Reached, values: Mapping[str, list[Json]]) -> Reached:
    """Leave out each remedy, the dearest first, or give it the mildest value with which the plan still fits."""
    for name in reversed([name for name in reached.changes if name in values]):
        changes = reached.changes
        milder = values[name][: values[name].index(changes[name])]
        without = {known: change for known, change in changes.items() if known != name}
        lower = [without, *({**changes, name: value} for value in milder)]
        reached = _first(tune, lower, lambda plan: plan.fits) or reached
    return reached


def _first(tune: Tune, alternatives: Iterable[Changes], accepts: Callable[..., bool]) -> Reached | None:
    """Return the first of these changes whose plan is accepted."""
    for changes in alternatives:
        if (plan := tune(changes)) and accepts(plan):
            return Reached(changes, plan)
    return None


def _other_generation(settings: RunSettings) -> list[Json]:
    # transformers keeps the keys and values of all rows. vLLM computes as many rows at a time as its cache takes.
    other = {"use_vllm": False} if settings.use_vllm else {"use_vllm": True, "vllm_mode": "colocate"}
    return [] if settings.use_cpu else [other]


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
        measured: Any = partial(machine.shape.measured, measure=None)  # type: ignore[call-arg]
        machine = machine._replace(accelerate=configs[name], shape=replace(machine.shape, measured=measured))
    return plan.changed(fields, machine)


def _merged(changes: Changes) -> Json:
    return {name: value for change in changes.values() for name, value in change.items()}
