"""A recipe, GPUs -> the answer of `grpo-math plan`: does it fit, what is largest, what to change.

Does not print. The only data that it reads about this machine are its GPUs and main memory, if they are not given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError
from grpo_math.planner import devices, memory, seconds
from grpo_math.planner.memory import Run
from grpo_math.planner.model import Shape, read_config, shape_of
from grpo_math.planner.seconds import Card
from grpo_math.planner.settings import NotPlanned, Settings, Zero, resolve
from grpo_math.run.machine import GB, main_memory
from grpo_math.settings import batch
from grpo_math.settings.accelerate import deepspeed_config
from grpo_math.settings.arguments import needing_whole
from grpo_math.settings.recipe import read_recipe
from grpo_math.settings.shipped import accelerate_file

MARGIN = 0.95  # of a GPU that a plan may fill
PROMPT_TOKENS = 512
# Fields with loss terms over whole micro-batches: trainer/config.py rejects a token budget with them.
WHOLE = {"entropy_coef", "use_adaptive_entropy", "top_entropy_quantile"}
# Accelerate configs, in the order in which they are tried if plain data parallelism does not fit.
ZERO = ("zero2", "zero2_offload", "zero3", "zero3_offload")
SLEEPING = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}


def plan(
    recipe: Settings,
    *,
    gpus: int | None = None,
    gpu_gb: float | None = None,
    cpu_gb: float | None = None,
    prompt_tokens: int | None = None,
    accelerate: Settings | None = None,
    configs: Mapping[str, Settings | None] | None = None,
    card: Card | None = None,
    offline: bool = False,
) -> dict[str, Any]:
    """Return the answer of `grpo-math plan --json`. GB are 2^30 bytes.

    ``gpus``, ``gpu_gb``: the number of GPUs and the memory of one; by default this machine's, ignored with ``use_cpu``.
    ``cpu_gb``: main memory, by default this machine's. ``prompt_tokens``: the longest prompt, by default
    ``vllm_max_model_length`` minus the completion length, or 512. ``accelerate``: the contents of an accelerate config;
    or ``configs``, several of them by name to choose from. ``card``: the speed of a GPU. ``offline``: do not use the
    Hub and do not measure. Raises `UserError` if the recipe cannot be planned.

    >>> recipe = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "dtype": "bfloat16", "use_peft": True}
    >>> answer = plan(recipe, gpus=1, gpu_gb=24, cpu_gb=64)
    >>> answer["fits"], answer["layout"][0]["gpus"], round(answer["bytes"]["base_weights"] / GB, 2)
    (True, [0], 0.92)
    """
    machine: dict[str, Any] = {"gpus": gpus, "gpu_gb": gpu_gb, "cpu_gb": cpu_gb, "prompt": prompt_tokens}
    name, counted = choose(recipe, configs or {"": accelerate}, **machine, offline=offline)
    suggestions = [] if counted.fits else suggest(counted)
    answer = {**counted.answer(), "suggestions": suggestions, "recommended": recommended(counted)}
    answer["accelerate_config"] = name or None
    answer["seconds"] = seconds.per_step(counted, card) if card and not counted.settings["use_cpu"] else None
    return answer


def shipped_configs(recipe: Settings) -> dict[str, Settings | None]:
    """Return the accelerate configs that `grpo-math train` tries, in order. The first is no config.

    >>> list(shipped_configs({}))
    ['', 'zero2', 'zero2_offload', 'zero3', 'zero3_offload']
    """
    if recipe.get("deepspeed") or recipe.get("fsdp") or recipe.get("use_cpu"):
        return {"": None}
    whole = needing_whole(recipe)  # checks/training.py rejects them under ZeRO-3 without vLLM
    names = [name for name in ZERO if not (whole and name.startswith("zero3"))]
    return {"": None, **{name: read_recipe(accelerate_file(name)) for name in names}}


def choose(
    recipe: Settings,
    configs: Mapping[str, Settings | None],
    *,
    gpus: int | None,
    gpu_gb: float | None,
    cpu_gb: float | None = None,
    prompt: int | None = None,
    offline: bool = False,
) -> tuple[str, Counted]:
    """Return (name, plan) of the first of the accelerate ``configs`` that fits. If none fits, return the first one.

    Raises the error of the first config. Later configs that cannot be planned are skipped.

    >>> recipe = {"model_name_or_path": "Qwen/Qwen2.5-1.5B", "gradient_accumulation_steps": 8}
    >>> name, counted = choose(recipe, {"multi_gpu": None, "zero2_offload": {"distributed_type": "DEEPSPEED",
    ...     "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"}}}, gpus=2, gpu_gb=24, cpu_gb=64)
    >>> name, counted.fits, counted.layout.name
    ('zero2_offload', True, 'transformers')
    """
    first: tuple[str, Counted] | None = None
    for name, accelerate in configs.items():
        try:
            machine, settings = _read(recipe, gpus, gpu_gb, cpu_gb, accelerate, prompt, offline)
            counted = Counted(machine, settings, set(recipe))
        except ConfigError:
            if first is None:
                raise
            continue
        if counted.fits:
            return name, counted
        first = first or (name, counted)
    assert first is not None
    return first


def serve_layout(recipe: Settings, *, gpus: int, gpu_gb: float) -> devices.Layout:
    """Return the layout with all GPUs of a machine for the server.

    >>> serve_layout({"model_name_or_path": "Qwen/Qwen2.5-7B", "use_peft": True}, gpus=4, gpu_gb=24).roles()[0]
    {'role': 'vLLM server, data parallel 4', 'gpus': [0, 1, 2, 3]}
    """
    machine, settings = _read(recipe, gpus, gpu_gb)
    need = devices.tensor_parallel(machine.shape, settings, machine.gpu_bytes, machine.prompt, gpus)
    server, tp = devices.server_ranks(machine.shape, settings, gpus, need)
    why = "1 GPU holds the model" if need == 1 else f"{need} GPUs hold the model"
    return devices.Layout("server", 0, server, tp, why, gpus - server)


def _read(
    recipe: Settings,
    gpus: int | None,
    gpu_gb: float | None,
    cpu_gb: float | None = None,
    accelerate: Settings | None = None,
    prompt: int | None = None,
    offline: bool = False,
) -> tuple[Machine, dict[str, Any]]:
    settings = resolve(recipe)
    if settings["use_cpu"]:
        gpu_gb = cpu_gb = cpu_gb or main_memory()
        gpus = int((accelerate or {}).get("num_processes", 1))
    elif gpus is None or gpu_gb is None:
        available, size = devices.here()
        if not available:
            option = "gpus" if gpus is None else "gpu_memory"
            raise ConfigError(option, None, "is not given, and this machine has no GPU", "use --gpus 1 --gpu_memory 24")
        gpus, gpu_gb = gpus or available, gpu_gb or size
    for option, value in (("gpus", gpus), ("gpu_memory", gpu_gb)):
        if not value or value <= 0:
            raise ConfigError(option, value, "is not above 0", "say what to plan for, as in --gpus 1 --gpu_memory 24")
    assert gpus is not None
    assert gpu_gb is not None
    for option, stated in (("cpu_memory", cpu_gb), ("prompt_tokens", prompt)):
        if stated is not None and stated <= 0:
            raise ConfigError(option, stated, "is not above 0", "leave it out for the default")
    name = settings["model_name_or_path"]
    shape = shape_of(str(name), read_config(name, settings["model_revision"], offline), measures=not offline)
    left = (settings["vllm_max_model_length"] or 0) - settings["max_completion_length"]
    prompt = prompt or (left if left > 0 else PROMPT_TOKENS)
    cpu_bytes = int((cpu_gb or main_memory()) * GB)
    return Machine(shape, gpus, int(gpu_gb * GB), cpu_bytes, prompt, accelerate), settings


class Machine(NamedTuple):
    """The model and the machine, which stay the same while settings are varied."""

    shape: Shape
    gpus: int
    gpu_bytes: int
    cpu_bytes: int
    prompt: int
    accelerate: Settings | None


class Counted:
    """The plan of one recipe on one machine: the layout, the terms of each phase, and the problems.

    ``given``: the fields that the recipe sets.
    """

    def __init__(self, machine: Machine, settings: Settings, given: set[str]) -> None:
        self.machine, self.settings, self.given, shape = machine, settings, given, machine.shape
        if (kind := (machine.accelerate or {}).get("distributed_type")) in ("FSDP", "MEGATRON_LM"):
            raise NotPlanned("distributed_type", kind, "is not known to the plan", "plan with DDP or DeepSpeed")
        config = deepspeed_config(settings, machine.accelerate)
        self.zero = Zero(config, shape.hidden)
        self.quantised = settings["load_in_4bit"] or settings["load_in_8bit"]
        if self.quantised and self.zero.stage == 3:
            raise NotPlanned("load_in_4bit", True, "under ZeRO-3 is not known to the plan", "use ZeRO-2")
        self.sequence = machine.prompt + settings["max_completion_length"]
        if settings["use_cpu"]:
            self.layout = devices.Layout("transformers", machine.gpus, 0, 1, "use_cpu is true")
        else:
            gpus = machine.gpus, machine.gpu_bytes
            self.layout = devices.arrange(shape, settings, *gpus, machine.prompt, partial(_divides, settings, given))
        n, generation = self.layout.policy, self.layout.generation
        self.batch = batch.plan(settings, given, n)
        rows, steps, rollout = self.batch.rows, self.batch.steps, self.batch.rollout
        self.run = Run(n, rows, steps, rollout, machine.prompt, machine.gpu_bytes, generation)
        precise = memory.precision(settings, self.zero, config)
        self.work = memory.work_of(shape, settings, self.run, self.zero.stage)
        self.phases, self.main = memory.phases(shape, settings, self.zero, precise, self.run)
        if self.layout.server:
            length = settings["vllm_max_model_length"] or self.sequence  # the server's command sets it
            engine = {"vllm_tensor_parallel_size": self.layout.tensor_parallel, "vllm_max_model_length": length}
            share = memory.VLLM_SERVER_SHARE * machine.gpu_bytes - memory.CONTEXT
            server = memory.vllm(shape, {**settings, **engine}, share, machine.prompt)
            self.phases["server"] = {**server, "cuda_context": memory.CONTEXT}
        if settings["use_cpu"]:  # each process has a copy in the same memory
            self.phases = {
                phase: {**{term: size * n for term, size in terms.items()}, "processes": self.main["processes"]}
                for phase, terms in self.phases.items()
            }
        self.limit, self.main_limit = int(MARGIN * machine.gpu_bytes), int(MARGIN * machine.cpu_bytes)
        self.problems = self._problems()

    def changed(self, changes: Settings) -> Counted | None:
        """Return the plan with changed settings on the same machine, or None if it cannot be planned."""
        try:
            return Counted(self.machine, resolve({**self.settings, **changes}), self.given | set(changes))
        except ConfigError:
            return None

    @property
    def peak_phase(self) -> str:
        """The policy's phase with more memory. A server always fills its GPUs, so it is ignored."""
        return max(("training", "generation"), key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> int:
        return sum(self.phases[self.peak_phase].values())

    @property
    def over(self) -> int:
        """Missing bytes, summed over the phases, vLLM's share and main memory."""
        over = sum(max(0, sum(terms.values()) - self.limit) for terms in self.phases.values())
        over += max(0, self.vllm_needs - self.vllm_share)
        return over + max(0, sum(self.main.values()) - self.main_limit)

    @property
    def vllm_share(self) -> int:
        return int(self.settings["vllm_gpu_memory_utilization"] * self.machine.gpu_bytes)

    @property
    def vllm_needs(self) -> int:
        """Bytes that vLLM needs on a shared GPU: weights, overhead, and one sequence of its context length."""
        if self.layout.generation != "colocate":
            return 0
        terms = self.phases["generation"]
        one = memory.sequence_bytes(self.machine.shape, self.settings, self.machine.prompt)
        return terms["vllm_weights"] + terms["vllm_overhead"] + one // self.layout.tensor_parallel

    @property
    def fits(self) -> bool:
        return not self.problems

    def _problems(self) -> list[str]:
        settings, machine, shape = self.settings, self.machine, self.machine.shape
        where = "memory" if settings["use_cpu"] else "a GPU"
        problems = []
        for phase, terms in self.phases.items():
            if (total := sum(terms.values())) > self.limit:
                usable = f"{self.limit / GB:.1f} of its {machine.gpu_bytes / GB:.4g} GB"
                problems.append(f"{phase} needs {total / GB:.1f} GB of {where}, which has {usable} to give")
        main, sequence = sum(self.main.values()), self.sequence
        if main > self.main_limit and not settings["use_cpu"]:
            problems.append(f"{main / GB:.1f} GB of main memory are needed, and there are {self.main_limit / GB:.1f}")
        if self.vllm_needs > self.vllm_share:
            tokens = memory.context_length(shape, settings, machine.prompt)
            problems.append(
                f"vLLM's share is {self.vllm_share / GB:.1f} GB, and its weights, overhead and one sequence of "
                f"{tokens} tokens take {self.vllm_needs / GB:.1f}"
            )
        if self.layout.generation == "colocate" and settings["load_in_8bit"]:
            problems.append("vLLM does not take a base in 8 bit: use load_in_4bit, or use_vllm: false")
        longest = min(shape.max_tokens or sequence, settings["vllm_max_model_length"] or sequence)
        if sequence > longest:
            problems.append(f"prompt and completion come to {sequence} tokens, and the model is given {longest}")
        return problems

    def answer(self) -> dict[str, Any]:
        phase, shape, cpu = self.peak_phase, self.machine.shape, self.settings["use_cpu"]
        terms, layout = self.phases[phase], self.layout.roles()
        if cpu:
            layout = [{"role": "policy, and generation by transformers, on the CPU", "gpus": []}]
        work = self.work
        return {
            "fits": self.fits,
            "problems": self.problems,
            "peak_gb": round(self.peak / GB, 3),
            "peak_phase": phase,
            "gpu_gb": round(self.machine.gpu_bytes / GB, 3),
            "largest": max(terms, key=lambda term: terms[term]),
            "bytes": terms,
            "phases": self.phases,
            "main_memory": self.main,
            "layout": layout,
            "why": self.layout.why,
            "batch": self.batch.line("CPU process" if cpu else "GPU"),
            "model": {"parameters": shape.total, "family": shape.family},
            "assumed": {
                "prompt_tokens": self.machine.prompt,
                "tokens_of_a_micro_batch": work.tokens,
                "packed": work.packed,
                "mlp_tiles": work.tiles,
                "slow_layers": shape.stateful,
            },
        }


def _divides(settings: Settings, given: set[str], processes: int) -> bool:
    try:
        batch.plan(settings, given, processes)
    except ConfigError:
        return False
    return True


# Suggested changes


def candidates(counted: Counted) -> list[dict[str, Any]]:
    """Return changes that can save memory, cheapest first. A change is a mapping of recipe fields.

    Free changes come first, then those that cost speed, then those that change what is learned.
    """
    s, rows, sequence, generation = counted.settings, counted.batch.rows, counted.sequence, counted.layout.generation
    gpu, lora, colocated, quantised = not s["use_cpu"], s["use_peft"], generation == "colocate", counted.quantised
    half = gpu and s["dtype"] == "float32"
    longer = colocated and (not s["vllm_max_model_length"] or s["vllm_max_model_length"] > sequence)
    length = {"vllm_max_model_length": sequence} if longer else {}
    smaller: list[dict[str, Any]] = []
    if memory.packs(counted.machine.shape, s) and not counted.given & WHOLE:
        budgets = [(s["max_tokens_per_micro_batch"] or rows * sequence) // 2**k for k in range(1, 8)]
        smaller = [{"max_tokens_per_micro_batch": budget} for budget in budgets if budget >= sequence]
    elif rows > 1 and rows % 2 == 0:
        steps = counted.batch.steps * 2
        smaller = [{"per_device_train_batch_size": rows // 2, "gradient_accumulation_steps": steps}]
    adamw = s["optim"] in ("adamw_torch", "adamw_torch_fused")
    changes: list[tuple[bool, dict[str, Any]]] = [
        (half and lora, {"dtype": "bfloat16"}),  # frozen weights lose almost no accuracy
        (not s["pack_updates"], {"pack_updates": True}),
        (longer, length),
        (colocated and not s["vllm_enable_sleep_mode"], {"vllm_enable_sleep_mode": True}),
        *((colocated, {**length, "vllm_gpu_memory_utilization": share / 20}) for share in range(19, 0, -1)),
        (not s["gradient_checkpointing"], {"gradient_checkpointing": True}),
        *((True, change) for change in smaller),
        (gpu and s["gradient_checkpointing"] and not s["activation_offloading"], {"activation_offloading": True}),
        (gpu and adamw, {"optim": "adamw_8bit"}),
        (lora and s["lora_dropout"] > 0, {"lora_dropout": 0.0}),
        (gpu and lora and not quantised, {"load_in_4bit": True, "use_bnb_nested_quant": True}),
        (not lora, {"use_peft": True, "lora_target_modules": "all-linear"}),
        (colocated, {"use_vllm": False}),
        (gpu and generation == "transformers", {**SLEEPING, "vllm_max_model_length": sequence}),
        (s["max_completion_length"] > 256, {"max_completion_length": s["max_completion_length"] // 2}),
    ]
    return [change for saves, change in changes if saves and any(s.get(k) != v for k, v in change.items())]


def suggest(counted: Counted) -> list[dict[str, Any]]:
    """Return changes that together make the recipe fit: as few and as cheap as possible, the largest saving first.

    ``saves_gb`` is the drop of the peak after the changes before it. If all changes together are not enough, the last
    one still has ``fits: false``.
    """

    def tried(changes: list[dict[str, Any]]) -> Counted | None:
        return counted.changed({name: value for change in changes for name, value in change.items()})

    choices, now = candidates(counted), counted
    chosen: list[dict[str, Any]] = []
    for change in choices:  # cheapest first; keep each change that helps
        kept = [earlier for earlier in chosen if set(earlier) != set(change)]
        if (then := tried([*kept, change])) and (then.fits or _nearer(then, now)):
            chosen, now = [*kept, change], then
        if now.fits:
            break
    if now.fits:  # drop each change that is not needed, or use a milder value, most expensive first
        for change in reversed(chosen[:]):
            milder = [other for other in choices if set(other) == set(change)]
            for others in ([], *([other] for other in milder[: milder.index(change)])):
                less = [used for earlier in chosen for used in (others if earlier is change else [earlier])]
                if (then := tried(less)) and then.fits:
                    chosen = less
                    break
    alone = {id(change): then.peak if (then := tried([change])) else counted.peak for change in chosen}
    chosen.sort(key=lambda change: alone[id(change)])
    suggestions, before = [], counted
    for number, change in enumerate(chosen, 1):
        after = tried(chosen[:number]) or before
        saved = round((before.peak - after.peak) / GB, 3)
        suggestions.append({"set": _lines(change), "change": change, "saves_gb": saved, "fits": after.fits})
        before = after
    return suggestions


def _nearer(then: Counted, now: Counted) -> bool:
    """Return True if ``then`` is missing less memory, or as much memory with fewer problems."""
    return (then.over, len(then.problems)) < (now.over, len(now.problems))


def _lines(change: Settings) -> list[str]:
    """Return the changes as lines of a recipe."""
    return [f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in change.items()]


def recommended(counted: Counted) -> dict[str, Any] | None:
    """Return the fastest layout that fits with the recipe otherwise unchanged. None if the recipe already has this
    layout, or no layout fits."""
    for change in [] if counted.settings["use_cpu"] else devices.recommend(counted.machine.gpus, counted.sequence):
        if (tried := counted.changed(change)) and tried.fits:
            if counted.fits and tried.layout == counted.layout:
                return None
            return {"layout": tried.layout.roles(), "set": _lines(change), "why": tried.layout.why}
    return None
