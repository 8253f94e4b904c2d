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
    or ``configs``, several of them by name to choose from. ``card``: the speed of a GPU, for ``seconds``.
    ``offline``: do not use the Hub and do not measure. Raises `UserError` if the recipe cannot be planned.

    >>> lora = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0}
    >>> recipe = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "dtype": "bfloat16", **lora}
    >>> answer = plan(recipe, gpus=1, gpu_gb=24, cpu_gb=64)
    >>> answer["fits"], answer["layout"][0]["gpus"], round(answer["bytes"]["base_weights"] / GB, 2)
    (True, [0], 0.92)
    """
    machine: dict[str, Any] = {"gpus": gpus, "gpu_gb": gpu_gb, "cpu_gb": cpu_gb, "prompt": prompt_tokens}
    name, counted = choose(recipe, configs or {"": accelerate}, **machine, offline=offline)
    timed = seconds.per_step(counted, card) if card and not counted.settings["use_cpu"] else None
    return {**counted.answer(), "suggestions": suggest(counted), "accelerate_config": name or None, "seconds": timed}


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


def choose(recipe: Settings, configs: Mapping[str, Settings | None], **machine: Any) -> tuple[str, Counted]:
    """Return (name, plan) of the first of the accelerate ``configs`` that fits. If none fits, return the first one.

    ``machine``: as in `_read`. Raises the error of the first config. Later configs that cannot be planned are skipped.

    >>> recipe = {"model_name_or_path": "Qwen/Qwen2.5-1.5B", "gradient_accumulation_steps": 8}
    >>> name, counted = choose(recipe, {"multi_gpu": None, "zero2_offload": {"distributed_type": "DEEPSPEED",
    ...     "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"}}}, gpus=2, gpu_gb=24, cpu_gb=64)
    >>> name, counted.fits, counted.layout.generation
    ('zero2_offload', True, 'transformers')
    """
    plans: list[tuple[str, Counted]] = []
    for name, accelerate in configs.items():
        try:
            known, settings = _read(recipe, accelerate=accelerate, **machine)
            plans.append((name, Counted(known, settings, set(recipe))))
        except ConfigError:
            if not plans:
                raise
        if plans[-1][1].fits:
            return plans[-1]
    return plans[0]


def serve_layout(recipe: Settings, *, gpus: int, gpu_gb: float) -> devices.Layout:
    """Return the layout with all GPUs of a machine for the server.

    >>> serve_layout({"model_name_or_path": "Qwen/Qwen2.5-7B", "use_peft": True}, gpus=4, gpu_gb=24).roles()[0]
    {'role': 'vLLM server, data parallel 4', 'gpus': [0, 1, 2, 3]}
    """
    machine, settings = _read(recipe, gpus=gpus, gpu_gb=gpu_gb)
    need, sizes = devices.tensor_parallel(machine.shape, settings, machine.gpu_bytes, machine.prompt, gpus)
    server, tp = devices.server_ranks(settings, gpus, need, sizes)
    return devices.Layout("server", 0, server, tp, "the server has all GPUs", gpus - server)


def _read(
    recipe: Settings,
    *,
    gpus: int | None,
    gpu_gb: float | None,
    cpu_gb: float | None = None,
    prompt: int | None = None,
    accelerate: Settings | None = None,
    offline: bool = False,
) -> tuple[Machine, dict[str, Any]]:
    settings = resolve(recipe)
    cpu_gb = cpu_gb or main_memory()
    if settings["use_cpu"]:
        # On a CPU the processes share main memory: it takes the place of a GPU's memory.
        gpus, gpu_gb = int((accelerate or {}).get("num_processes", 1)), cpu_gb
    elif gpus is None or gpu_gb is None:
        available, size = devices.here()
        if not available:
            option = "gpus" if gpus is None else "gpu_memory"
            raise ConfigError(option, None, "is not given, and this machine has no GPU", "use --gpus 1 --gpu_memory 24")
        gpus, gpu_gb = gpus or available, gpu_gb or size
    name = settings["model_name_or_path"]
    shape = shape_of(str(name), read_config(name, settings["model_revision"], offline), measures=not offline)
    left = (settings["vllm_max_model_length"] or 0) - settings["max_completion_length"]
    prompt = prompt or (left if left > 0 else PROMPT_TOKENS)
    return Machine(shape, gpus, int(gpu_gb * GB), int(cpu_gb * GB), prompt, accelerate), settings


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
        gpus, need, sizes = machine.gpus, 1, [1]
        serves = settings["use_vllm"] and settings["vllm_mode"] == "server" and not devices.elsewhere(settings)
        # With one GPU, `arrange` raises the error of a server without a GPU.
        if serves and gpus > 1:
            most = gpus - 1
            need, sizes = devices.tensor_parallel(shape, settings, machine.gpu_bytes, machine.prompt, most)
        self.layout = devices.arrange(settings, gpus, need, sizes, partial(divides, settings, given))
        n = self.layout.policy
        self.batch = batch.plan(settings, given, n)
        self.run = Run(self.batch, machine.prompt, machine.gpu_bytes, self.layout.generation)
        precise = memory.precision(settings, self.zero, config)
        self.work = memory.work_of(shape, settings, self.run, self.zero.stage)
        self.phases, self.main = memory.phases(shape, settings, self.zero, precise, self.run)
        if self.layout.server:
            # Without vllm_max_model_length, the server's context is as long as its memory allows (train/serve.py). The
            # plan asks for room for one sequence of this recipe.
            length = settings["vllm_max_model_length"] or self.sequence
            engine = {"vllm_tensor_parallel_size": self.layout.tensor_parallel, "vllm_max_model_length": length}
            share = memory.VLLM_SERVER_SHARE * machine.gpu_bytes - memory.CONTEXT
            server = memory.vllm(shape, {**settings, **engine}, share, machine.prompt)
            self.phases["server"] = {**server, "cuda_context": memory.CONTEXT}
        if settings["use_cpu"]:  # each process has a copy in the same memory
            self.phases = {
                phase: {**{term: size * n for term, size in terms.items()}, "processes": self.main["processes"]}
                for phase, terms in self.phases.items()
            }
        self.limit = int(MARGIN * machine.gpu_bytes)
        self.missing = self._missing()

    def changed(self, changes: list[dict[str, Any]]) -> Counted | None:
        """Return the plan with changed settings on the same machine, or None if it cannot be planned."""
        fields = {name: value for change in changes for name, value in change.items()}
        try:
            return Counted(self.machine, resolve({**self.settings, **fields}), self.given | set(fields))
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
    def severity(self) -> tuple[int, int]:
        """Return the missing bytes and the number of problems: of two plans, the lower one is nearer to fitting."""
        return sum(size for size, _ in self.missing), len(self.missing)

    @property
    def problems(self) -> list[str]:
        return [message for _, message in self.missing]

    @property
    def fits(self) -> bool:
        return not self.missing

    def _missing(self) -> list[tuple[int, str]]:
        """Return the missing bytes of each problem, and a line about the problem."""
        settings, machine, shape = self.settings, self.machine, self.machine.shape
        where, sequence = "memory" if settings["use_cpu"] else "a GPU", self.sequence
        missing = []
        for phase, terms in self.phases.items():
            if (total := sum(terms.values())) > self.limit:
                usable = f"{self.limit / GB:.1f} of its {machine.gpu_bytes / GB:.4g} GB"
                line = f"{phase} needs {total / GB:.1f} GB of {where}, which has {usable} to give"
                missing.append((total - self.limit, line))
        main, most = sum(self.main.values()), int(MARGIN * machine.cpu_bytes)
        if main > most and not settings["use_cpu"]:
            line = f"{main / GB:.1f} GB of main memory are needed, and there are {most / GB:.1f}"
            missing.append((main - most, line))
        if self.layout.generation == "colocate":
            share, terms = int(settings["vllm_gpu_memory_utilization"] * machine.gpu_bytes), self.phases["generation"]
            one = memory.sequence_bytes(shape, settings, machine.prompt) // self.layout.tensor_parallel
            needed = terms["vllm_weights"] + terms["vllm_overhead"] + one
            if needed > share:
                tokens = memory.context_length(shape, settings, machine.prompt)
                line = f"vLLM's share is {share / GB:.1f} GB, and its weights, overhead and one sequence of {tokens}"
                missing.append((needed - share, f"{line} tokens take {needed / GB:.1f}"))
            # TRL raises for such a base when it starts the engine, after the weights are loaded.
            if settings["load_in_8bit"]:
                missing.append((0, "vLLM does not take a base in 8 bit: use load_in_4bit, or use_vllm: false"))
        longest = min(shape.max_tokens or sequence, settings["vllm_max_model_length"] or sequence)
        if sequence > longest:
            line = f"prompt and completion come to {sequence} tokens, and the model is given {longest}"
            missing.append((0, line))
        return missing

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
                "mlp_tiles": work.tiles,
            },
        }


def divides(settings: Settings, given: set[str], processes: int) -> bool:
    """Return True if the batch can be divided evenly by a number of processes."""
    try:
        batch.plan(settings, given, processes)
    except ConfigError:
        return False
    return True


# Suggested changes

# Fields that change nothing on a CPU.
OF_A_GPU = {"dtype", "activation_offloading", "optim", "load_in_4bit", "use_vllm"}


def candidates(counted: Counted) -> list[list[dict[str, Any]]]:
    """Return changes that can save memory, cheapest first: for each, the values to try. A change is recipe fields.

    Free changes come first, then those that cost speed, then those that change what is learned.
    """
    s, sequence = counted.settings, counted.sequence
    whole = s["max_tokens_per_micro_batch"] or counted.batch.rows * sequence
    budgets = [] if counted.given & WHOLE else [whole // 2**k for k in range(1, 8)]
    sleeping = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
    choices: list[list[dict[str, Any]]] = [
        [{"dtype": "bfloat16"}] if s["use_peft"] else [],  # frozen weights lose almost no accuracy
        [{"vllm_max_model_length": sequence}],
        [{"vllm_enable_sleep_mode": True}],
        [{"vllm_gpu_memory_utilization": share / 10} for share in range(9, 0, -1)],
        [{"gradient_checkpointing": True}],
        # A completion stays whole, so a budget below one sequence saves nothing.
        [{"max_tokens_per_micro_batch": budget} for budget in budgets if budget >= sequence],
        [{"activation_offloading": True}],
        [{"optim": "adamw_8bit"}],
        [{"lora_dropout": 0.0}],
        [] if counted.quantised else [{"load_in_4bit": True, "use_bnb_nested_quant": True}],
        [{"use_peft": True, "lora_target_modules": "all-linear"}],
        # transformers keeps the keys and values of all rows. vLLM computes as many rows at a time as its cache takes.
        [] if s["use_vllm"] else [{**sleeping, "vllm_max_model_length": sequence}],
        [{"use_vllm": False}],
        [{"max_completion_length": max(256, s["max_completion_length"] // 2)}],
    ]
    if s["use_cpu"]:
        return [changes for changes in choices if not any(OF_A_GPU & change.keys() for change in changes)]
    return choices


def suggest(counted: Counted) -> list[dict[str, Any]]:
    """Return changes that together make the recipe fit: the cheapest ones, and none that is not needed.

    ``saves_gb`` is the drop of the peak after the changes before it. If all changes together are not enough, the last
    one still has ``fits: false``.
    """
    chosen: list[dict[str, Any]] = []
    now = counted
    for changes in candidates(counted):
        if now.fits:
            break
        plans = [(change, then) for change in changes if (then := counted.changed([*chosen, change]))]
        # Of several values, the first that fits: min() returns the first of equal ones.
        change, then = min(plans, key=lambda entry: entry[1].severity, default=({}, now))
        if then.severity < now.severity:
            chosen, now = [*chosen, change], then
    # A later change may have made an earlier one unnecessary. Drop the dearest first.
    for change in reversed(chosen):
        fewer = [other for other in chosen if other is not change]
        if now.fits and (then := counted.changed(fewer)) and then.fits:
            chosen = fewer
    suggestions, before = [], counted
    for number, change in enumerate(chosen, 1):
        after = counted.changed(chosen[:number]) or before
        saved = round((before.peak - after.peak) / GB, 3)
        lines = [f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in change.items()]
        suggestions.append({"set": lines, "change": change, "saves_gb": saved, "fits": after.fits})
        before = after
    return suggestions
