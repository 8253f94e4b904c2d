"""A recipe, GPUs -> the answer of `grpo-math plan`: does it fit, what is largest, what to change.

The only data that it reads about this machine are its GPUs and main memory, if they are not given.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from grpo_math.errors import ConfigError, UserError
from grpo_math.generation.dtypes import corrections, dtype_error, has_bfloat16
from grpo_math.planner import devices, memory, seconds
from grpo_math.planner.calibration import Calibration
from grpo_math.planner.cards import Card
from grpo_math.planner.model import model_shape, read_config
from grpo_math.planner.settings import Json, NotPlanned, Settings, Zero, resolve
from grpo_math.planner.work import Machine, largest
from grpo_math.settings import batch, rules
from grpo_math.settings.accelerate import deepspeed_config
from grpo_math.system.gpus import capabilities, count_and_gb
from grpo_math.system.machine import GB, main_memory

MARGIN = 0.95  # of a GPU that a plan may fill
PROMPT_TOKENS = 512
SHORTEST = 256  # tokens of a completion that is suggested
# Fields with loss terms over whole micro-batches: a token budget has no effect with them.
WHOLE = {"entropy_coef", "use_adaptive_entropy", "top_entropy_quantile"}


class Counted:
    """The plan of one recipe on one machine: the layout, the terms of each phase, and the problems.

    ``given``: the fields that the recipe sets. ``refused``: the fields that training refuses. ``peak_phase``: the
    policy's phase with more memory; a server always fills its GPUs, so it is ignored. ``missing``: the missing bytes of
    each problem, and a line about the problem.
    ``severity``: of two plans, the one with the lower severity is nearer to fitting.
    """

    def __init__(self, machine: Machine, settings: Settings, given: set[str]) -> None:
        self.machine = machine
        self.settings = settings
        self.given = given
        self.refused = {error.field for level, error in rules.violations(settings) if level == "error"}
        shape = machine.shape
        config = deepspeed_config(settings, machine.accelerate)
        zero = Zero(config, shape.hidden)
        for name in ("load_in_4bit", "vllm_share_weights"):
            if settings[name] and zero.stage == 3:
                raise NotPlanned(name, True, "under ZeRO-3 is not known to the plan", "use ZeRO-2")
        self.sequence = machine.prompt + settings["max_completion_length"]
        if shape.packed and self.sequence >= shape.packed:
            reason = f"after {machine.prompt} tokens of prompt is not packed, which is not known to the plan"
            length = settings["max_completion_length"]
            raise NotPlanned("max_completion_length", length, reason, f"use less than {shape.packed - machine.prompt}")
        sizes = partial(devices.tensor_parallel, machine, settings, machine.gpus - 1)
        self.layout = devices.assign_gpus(settings, machine.gpus, sizes, partial(batch.divides, settings, given))
        self.batch = batch.plan(settings, given, self.layout.policy)
        work = largest(machine, settings, self.batch, zero.stage)
        self.precise = memory.precision(settings, zero, config)
        self.phases, self.main = memory.phases(
            machine, settings, zero, self.precise, self.batch, self.layout.generation, work
        )
        self.peak_phase = max(self.phases, key=lambda phase: memory.total(self.phases[phase]))
        self.peak = memory.total(self.phases[self.peak_phase])
        if self.layout.server:
            # Without vllm_max_model_length, the server's context is as long as its memory allows (train/serve.py). The
            # plan asks for room for one sequence of this recipe.
            length = settings["vllm_max_model_length"] or self.sequence
            engine = {"vllm_tensor_parallel_size": self.layout.tensor_parallel, "vllm_max_model_length": length}
            context = machine.calibration.context if machine.calibration else memory.CONTEXT
            share = int(memory.VLLM_SERVER_SHARE * machine.gpu_bytes) - context
            server = memory.vllm(shape, {**settings, **engine}, share, machine.prompt)
            self.phases["server"] = {**server, "CUDA_context": context}
        self.missing = [(needed - limit, line) for needed, limit, line in self._bounds() if needed > limit]
        self.problems = [line for _, line in self.missing]
        self.fits = not self.missing
        self.severity = sum(size for size, _ in self.missing), len(self.missing)

    @property
    def vllm_bytes(self) -> int:
        """Return the bytes of a colocated vLLM: its share of the GPU, or the least that it needs."""
        return sum(size for term, size in self.phases["generation"].items() if term.startswith("vLLM"))

    def changed(self, changes: Iterable[Json]) -> "Counted | None":
        """Return the plan with changed settings on the same machine, or None if it cannot be planned.

        None, too, if training would refuse the settings, or if completions would be generated for more optimizer steps
        than before: their policy would be older.
        """
        fields = {name: value for change in changes for name, value in change.items()}
        with suppress(UserError):
            settings = resolve({**self.settings, **fields}, self.machine.capability)
            then = Counted(self.machine, settings, self.given | set(fields))
            older = then.batch.rollout * self.batch.total > max(self.batch.rollout, self.batch.total) * then.batch.total
            if then.refused <= self.refused and not older:
                return then
        return None

    def _bounds(self) -> Iterator[tuple[int, int, str]]:
        """Yield the bytes that the run needs, those that it has, and the problem if these are less."""
        settings, machine, limit = self.settings, self.machine, int(MARGIN * self.machine.gpu_bytes)
        where = "of memory" if settings["use_cpu"] else "per GPU"
        where += f"; {limit / GB:.1f} of {machine.gpu_bytes / GB:.4g} GB are usable"
        for phase, terms in self.phases.items():
            needed = memory.total(terms)
            yield needed, limit, f"{phase} needs {needed / GB:.1f} GB {where}"
        if not settings["use_cpu"]:
            main, most = memory.total(self.main), int(MARGIN * machine.cpu_bytes)
            yield main, most, f"{main / GB:.1f} GB of main memory are needed, and there are {most / GB:.1f}"
        if self.layout.generation == "colocate":
            share = int(settings["vllm_gpu_memory_utilization"] * machine.gpu_bytes)
            # The terms fill the share, or they are the least that vLLM needs.
            needed = self.vllm_bytes
            tokens = memory.context_length(machine.shape, settings, machine.prompt)
            line = f"vLLM's share is {share / GB:.1f} GB, and its weights, overhead and one sequence of {tokens} tokens"
            yield needed, share, f"{line} take {needed / GB:.1f}"
        longest = min(machine.shape.max_tokens or self.sequence, settings["vllm_max_model_length"] or self.sequence)
        line = f"prompt and completion come to {self.sequence} tokens, and the model is given {longest}"
        # A byte short for any number of tokens: halving them is no progress.
        yield self.sequence > longest, 0, line
        if error := dtype_error(settings, machine.capability, machine.family):
            yield 1, 0, str(error)

    def answer(self) -> Json:
        """Return the plan as JSON."""
        terms, layout, device = self.phases[self.peak_phase], self.layout.roles(), "GPU"
        if self.settings["use_cpu"]:
            layout, device = [{"role": "policy, and generation by transformers, on the CPU", "gpus": []}], "CPU process"
        return {
            "fits": self.fits,
            "problems": self.problems,
            "peak_gb": round(self.peak / GB, 3),
            "gpu_gb": round(self.machine.gpu_bytes / GB, 3),
            "largest": max(terms, key=lambda term: terms[term]),
            "bytes": terms,
            "phases": self.phases,
            "main_memory": self.main,
            "layout": layout,
            "why": self.layout.why,
            "batch": self.batch.line(device),
            "prompt_tokens": self.machine.prompt,
        }


def plan(
    recipe: Settings, configs: Mapping[str, Settings | None] | None = None, card: Card | None = None, **machine: Any
) -> Json:
    """Return the answer of `grpo-math plan --json`. GB are 2^30 bytes.

    ``gpus``, ``gpu_gb``: the number of GPUs and the memory of one; by default this machine's, ignored with ``use_cpu``.
    ``cpu_gb``: main memory, by default this machine's. ``prompt_tokens``: the longest prompt, by default
    ``vllm_max_model_length`` minus the completion length, or 512. ``configs``: the contents of accelerate configs
    by name, of which the first that fits is chosen. ``card``: the speed of a GPU, for ``seconds``.
    ``offline``: do not use the Hub and do not measure. ``calibration``: the measurements of the GPU. Raises
    `UserError` if the recipe cannot be planned.

    >>> lora = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0}
    >>> recipe = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "dtype": "bfloat16", **lora}
    >>> answer = plan(recipe, gpus=1, gpu_gb=24, cpu_gb=64)
    >>> answer["fits"], answer["layout"][0]["gpus"], round(answer["bytes"]["base_weights"] / GB, 2)
    (True, [0], 0.92)
    """
    plans = _plans(recipe, configs or {"": None}, **machine)
    name, counted = _first_that_fits(plans)
    if known := counted.machine.calibration:
        card = known.card(counted.machine.gpu_bytes / GB)
    timed = (
        seconds.per_step(counted.machine, counted.settings, counted.batch, counted.layout, card, counted.precise)
        if card and not counted.settings["use_cpu"]
        else None
    )
    return {**counted.answer(), "accelerate_config": name or None, "seconds": timed, **advice(plans)}


def choose(recipe: Settings, configs: Mapping[str, Settings | None], **machine: Any) -> tuple[str, Counted]:
    """Return (name, plan) of the first of the accelerate ``configs`` that fits. If none fits, return the first one.

    ``machine``: as in `_read`. Raises the error of the first config. Later configs that cannot be planned are skipped.

    >>> recipe = {"model_name_or_path": "Qwen/Qwen2.5-1.5B", "gradient_accumulation_steps": 8}
    >>> name, counted = choose(recipe, {"multi_gpu": None, "zero2_offload": {"distributed_type": "DEEPSPEED",
    ...     "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"}}}, gpus=2, gpu_gb=24, cpu_gb=64)
    >>> name, counted.fits, counted.layout.generation
    ('zero2_offload', True, 'transformers')
    """
    return _first_that_fits(_plans(recipe, configs, **machine))


def unplanned_layout(settings: Settings, given: set[str], gpus: int) -> devices.Layout:
    """Return the layout of a recipe whose memory cannot be computed. The recipe gives the size of the server."""
    size = settings["vllm_tensor_parallel_size"]
    return devices.assign_gpus(settings, gpus, lambda: (size, [size]), partial(batch.divides, settings, given))


def _first_that_fits(plans: list[tuple[str, Counted]]) -> tuple[str, Counted]:
    return plans[-1] if plans[-1][1].fits else plans[0]


def _plans(recipe: Settings, configs: Mapping[str, Settings | None], **machine: Any) -> list[tuple[str, Counted]]:
    """Return the name and the plan of each config, up to the first that fits."""
    plans: list[tuple[str, Counted]] = []
    for name, accelerate in configs.items():
        try:
            plans.append((name, Counted(*_read(recipe, accelerate=accelerate, **machine), set(recipe))))
        except ConfigError:
            if not plans:
                raise
        # A problem of lengths or number formats counts as one byte. No other config solves it.
        if plans[-1][1].severity[0] <= 2:
            break
    return plans


def serve_layout(recipe: Settings, *, gpus: int, gpu_gb: float) -> devices.Layout:
    """Return the layout with all GPUs of a machine for the server.

    >>> serve_layout({"model_name_or_path": "Qwen/Qwen2.5-7B", "use_peft": True}, gpus=4, gpu_gb=24).roles()[0]
    {'role': 'vLLM server, data parallel 4', 'gpus': [0, 1, 2, 3]}
    >>> serve_layout({"model_name_or_path": "Qwen/Qwen2.5-32B", "use_peft": True}, gpus=8, gpu_gb=40)[:4]
    ('server', 0, 8, 2)
    >>> full = serve_layout({"model_name_or_path": "Qwen/Qwen2.5-32B"}, gpus=6, gpu_gb=80)
    >>> full.server, full.tensor_parallel, full.idle
    (4, 4, 2)
    """
    machine, settings = _read(recipe, gpus=gpus, gpu_gb=gpu_gb)
    need, sizes = devices.tensor_parallel(machine, settings, gpus)
    server, tp = devices.server_ranks(settings, gpus, need, sizes)
    return devices.Layout("server", 0, server, tp, "the server has all GPUs", gpus - server)


def _read(
    recipe: Settings,
    *,
    gpus: int | None = None,
    gpu_gb: float | None = None,
    cpu_gb: float | None = None,
    prompt_tokens: int | None = None,
    accelerate: Settings | None = None,
    capability: float | None = None,
    offline: bool = False,
    calibration: Calibration | None = None,
) -> tuple[Machine, Json]:
    cpu_gb, says = cpu_gb or main_memory(), accelerate or {}
    if (kind := says.get("distributed_type")) in ("FSDP", "MEGATRON_LM"):
        raise NotPlanned("distributed_type", kind, "is not known to the plan", "plan with DDP or DeepSpeed")
    if on_cpu := bool(recipe.get("use_cpu")):
        # On a CPU the processes share main memory: it takes the place of a GPU's memory.
        gpus, gpu_gb = int(says.get("num_processes", 1)), cpu_gb
    elif gpus is None or gpu_gb is None:
        available, size = count_and_gb()
        if gpu_gb is None and capability is None:
            capability = min(capabilities(), default=None)
        gpus, gpu_gb, option = gpus or available, gpu_gb or size, "gpu_memory" if gpus else "gpus"
        if not available:
            raise ConfigError(option, None, "is not given, and this machine has no GPU", "use --gpus 1 --gpu_memory 24")
    settings = resolve(recipe, None if on_cpu else capability)
    name = settings["model_name_or_path"]
    config = read_config(name, settings["model_revision"], offline)
    shape = model_shape(str(name), config, measures=not offline)
    if settings["router_aux_loss_coef"] is None:
        # TRL's default is that of the model's config.
        settings["router_aux_loss_coef"] = config.get("router_aux_loss_coef", float(shape.active < shape.total))
    teacher = settings["reference_model"]
    if teacher:
        teacher = model_shape(str(teacher), read_config(teacher, offline=offline), measures=not offline)
    left = (settings["vllm_max_model_length"] or 0) - settings["max_completion_length"]
    prompt = prompt_tokens or (left if left > 0 else PROMPT_TOKENS)
    machine = Machine(
        shape,
        gpus,
        int(gpu_gb * GB),
        int(cpu_gb * GB),
        prompt,
        accelerate,
        None if on_cpu else capability,
        teacher,
        config.get("model_type", ""),
        calibration,
    )
    return machine, settings


# Suggested changes

# Fields that change nothing on a CPU.
GPU_FIELDS = {"dtype", "bf16", "activation_offloading", "optim", "load_in_4bit", "use_vllm", "vllm_share_weights"}
ADAPTER = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0}
Changes = dict[str, Json]  # the recipe fields of each change, by its name in `candidates`


def candidates(counted: Counted) -> dict[str, list[Json]]:
    """Return the changes that can save memory, in the order of what they cost the user: first those that are free, then
    those that cost speed, then those that change what is learned.

    Each is a list of values to try, the mildest first. A value is recipe fields. Later changes override earlier ones.
    """
    s = counted.settings
    name = "prompts_per_step" if s["prompts_per_step"] else "gradient_accumulation_steps"
    # Frozen weights lose almost no accuracy in 16 bit. Without bfloat16, ``auto`` is float16.
    with_float16 = {"dtype": "auto"} if s["fp16"] else {}
    half = {"dtype": "bfloat16"} if has_bfloat16(counted.machine.capability) else with_float16
    quantised, nested = {"load_in_4bit": True}, {"use_bnb_nested_quant": True}
    share = {"vllm_share_weights": True}
    switch = {"use_vllm": False} if s["use_vllm"] else {"use_vllm": True, "vllm_mode": "colocate"}
    choices: dict[str, list[Json]] = {
        "dtype": [half] if s["use_peft"] else [],
        "context": [{"vllm_max_model_length": counted.sequence}] if s["use_vllm"] else [],
        "dropout": [{"lora_dropout": 0.0}],
        "micro_batch": [*_micro_batches(counted)],
        "checkpointing": [{"gradient_checkpointing": True}],
        "sleep": [{"vllm_enable_sleep_mode": True}] if s["use_vllm"] else [],
        "optimizer": [{"optim": "adamw_8bit"}],
        "rollout": [{"steps_per_generation": steps} for steps in batch.divisors(counted.batch.steps)[-2::-1]],
        "base": [share, quantised, quantised | nested, quantised | nested | share],
        "offload": [{"activation_offloading": True}],
        # DeepSpeed's configs, which `advice` tries.
        "accelerate_config": [],
        # transformers keeps the keys and values of all rows. vLLM computes as many rows at a time as its cache takes.
        "generation": [switch],
        "adapter": [] if s["use_peft"] else [fields | half for fields in (ADAPTER, ADAPTER | quantised | nested)],
        "prompts": [{name: n} for n in batch.divisors(s["prompts_per_step"] or counted.batch.steps)[-2::-1]],
        "completions": [],
        # The share of the GPU comes last, because it depends on all the others: `tuned` sets it.
        "share": [],
    }
    skipped = GPU_FIELDS if s["use_cpu"] else set()
    # Only fields that differ from the recipe's.
    differ = {n: [{k: v for k, v in change.items() if s[k] != v} for change in choices[n]] for n in choices}
    useful = {n: [change for change in differ[n] if change and not skipped & change.keys()] for n in differ}
    # These override the context that is proposed for the recipe's length.
    return {**useful, "completions": [*_completions(counted)]}


def _completions(counted: Counted) -> Iterator[Json]:
    """Yield shorter completions: the longest that the model has positions for, and halves. For vLLM each comes with the
    recipe's context, and with the shortest possible one."""
    settings, prompt = counted.settings, counted.machine.prompt
    lengths = {settings["max_completion_length"] // 2**k for k in range(1, 16)}
    lengths.add((counted.machine.shape.max_tokens or counted.sequence) - prompt)
    for length in sorted(lengths, reverse=True):
        if SHORTEST <= length < settings["max_completion_length"]:
            yield {"max_completion_length": length, "vllm_max_model_length": settings["vllm_max_model_length"]}
            if settings["use_vllm"]:
                yield {"max_completion_length": length, "vllm_max_model_length": prompt + length}


def _micro_batches(counted: Counted) -> Iterator[Json]:
    """Yield changes that make micro-batches smaller: of their rows if an optimizer step keeps them whole."""
    rows, settings = counted.batch.rows, counted.settings
    if counted.given & WHOLE or settings["router_aux_loss_coef"]:
        for n in batch.divisors(rows)[1:]:
            # With prompts_per_step the number of steps is solved.
            steps = {} if settings["prompts_per_step"] else {"gradient_accumulation_steps": counted.batch.steps * n}
            yield {"per_device_train_batch_size": rows // n, **steps}
        return
    tokens = settings["max_tokens_per_micro_batch"] or rows * counted.sequence
    # Layers whose memory is not linear in their tokens are measured at each size, which takes seconds.
    factor = 2 if counted.machine.shape.linear else 4
    # A completion stays whole, so a budget below the shortest sequence saves nothing.
    least = min(counted.sequence, counted.machine.prompt + SHORTEST)
    while tokens > least:
        tokens = max(tokens // factor, least)
        yield {"max_tokens_per_micro_batch": tokens}


def tuned(counted: Counted, changes: Changes) -> tuple[Changes, Counted] | None:
    """Return the changes and their plan, or None if they cannot be planned.

    If they do not fit, a colocated vLLM gets the share of the GPU that the policy leaves.
    """
    changes = {name: change for name, change in changes.items() if name != "share"}
    then = counted.changed(changes.values())
    if then and not then.fits and then.layout.generation == "colocate":
        with_vllm = [terms for terms in then.phases.values() if "vLLM_weights" in terms]
        policy = max(memory.total(terms) for terms in with_vllm) - then.vllm_bytes
        share = int(20 * (MARGIN - policy / counted.machine.gpu_bytes)) / 20
        shared = {**changes, "share": {"vllm_gpu_memory_utilization": max(0.05, min(share, 0.9))}}
        if (better := counted.changed(shared.values())) and better.severity < then.severity:
            return shared, better
    return (changes, then) if then else None


def search(counted: Counted) -> tuple[Changes, Counted]:
    """Return changes that together make the recipe fit, and their plan: the cheapest ones, and none that is not needed.

    Starts with all changes together, and takes them back in turn, the dearest first, until none can be taken back or
    made milder. If all together do not fit, returns the plan of all of them.
    """
    choices = candidates(counted)
    changes, now = tuned(counted, {}) or ({}, counted)
    for name, values in choices.items():
        # `advice` switches the generation, and searches with each.
        for change in () if name == "generation" else reversed(values):
            if (then := tuned(counted, {**changes, name: change})) and then[1].severity <= now.severity:
                changes, now = then
                break
    back = now.fits
    while back:
        back = False
        for name in [name for name in reversed(changes) if name != "share"]:
            fewer = {known: change for known, change in changes.items() if known != name}
            milder = choices[name][: choices[name].index(changes[name])]
            for less in (fewer, *({**changes, name: change} for change in milder)):
                if (then := tuned(counted, less)) and then[1].fits:
                    changes, now, back = *then, True
                    break
    return changes, now


def advice(plans: list[tuple[str, Counted]]) -> Json:
    """Return {"suggestions": changes that make a recipe fit, "best": their plan, "lacking": what is missing if all
    changes together do not fit}.

    ``plans``: those of the accelerate configs. ``saves_gb`` is the drop of the peak after the changes before it.
    """
    if plans[-1][1].fits:
        return {"suggestions": [], "best": None, "lacking": []}
    names = list(candidates(plans[0][1]))
    dear = names.index("accelerate_config")
    fitting: list[tuple[list[int], str, Counted, Changes, Counted]] = []
    nearest: list[Counted] = []
    for config, counted in plans:
        if any(cost < [dear] for cost, *_ in fitting):
            break
        if config:
            # Measuring takes seconds, so that a DeepSpeed config is searched with what has been measured.
            measured: Any = partial(counted.machine.shape.measured, measures=False)  # type: ignore[call-arg]
            counted.machine = counted.machine._replace(shape=replace(counted.machine.shape, measured=measured))
        # A GPU without bfloat16 leaves no choice.
        fixes = corrections(counted.settings, counted.machine.capability, counted.machine.family)
        needed = {"dtype": fixes} if fixes else {}
        for switch in ({}, *({"generation": change} for change in candidates(counted)["generation"])):
            first = {**needed, **switch}
            if start := counted.changed(first.values()):
                changes, then = search(start)
                nearest.append(then)
                changes = {
                    name: {
                        field: value
                        for field, value in {**first, **changes}[name].items()
                        if counted.settings[field] != value
                    }
                    for name in names
                    if name in {*first, *changes}
                }
                costs = [names.index(name) for name in changes if name != "share"] + [dear] * bool(config)
                if then.fits:
                    fitting.append((sorted(costs, reverse=True), config, counted, changes, then))
    if not fitting:
        lacking = min(nearest, key=lambda counted: counted.severity)
        return {"suggestions": [], "best": None, "lacking": lacking.problems}
    _, config, counted, changes, best = min(fitting, key=lambda entry: entry[0])
    chosen = list(changes.values())
    steps = [counted, *(counted.changed(chosen[:number]) or counted for number in range(1, len(chosen)))]
    suggestions = [
        {
            "set": [f"{k}: {v if isinstance(v, str) else json.dumps(v)}" for k, v in change.items()],
            "change": change,
            "saves_gb": round((before.peak - after.peak) / GB, 3),
            "fits": after.fits,
        }
        for change, (before, after) in zip(chosen, pairwise([*steps, best]), strict=True)
    ]
    return {"suggestions": suggestions, "best": {**best.answer(), "accelerate_config": config or None}, "lacking": []}
