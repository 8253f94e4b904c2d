"""A recipe, GPUs -> the answer of `grpo-math plan`: does it fit, what is largest, what to change.

Does not print. The only data that it reads about this machine are its GPUs and main memory, if they are not given.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.planner import devices, memory, seconds
from grpo_math.planner.model import read_config, shape_of
from grpo_math.planner.seconds import Card
from grpo_math.planner.settings import Json, NotPlanned, Settings, Zero, resolve
from grpo_math.planner.work import Machine, largest
from grpo_math.run.gpus import count_and_gb
from grpo_math.run.machine import GB, main_memory
from grpo_math.settings import batch
from grpo_math.settings.accelerate import deepspeed_config

MARGIN = 0.95  # of a GPU that a plan may fill
PROMPT_TOKENS = 512
# Fields with loss terms over whole micro-batches: trainer/config.py rejects a token budget with them.
WHOLE = {"entropy_coef", "use_adaptive_entropy", "top_entropy_quantile"}


class Counted:
    """The plan of one recipe on one machine: the layout, the terms of each phase, and the problems.

    ``given``: the fields that the recipe sets. ``peak_phase``: the policy's phase with more memory; a server always
    fills its GPUs, so it is ignored. ``missing``: the missing bytes of each problem, and a line about the problem.
    ``severity``: of two plans, the one with the lower severity is nearer to fitting.
    """

    def __init__(self, machine: Machine, settings: Settings, given: set[str]) -> None:
        self.machine, self.settings, self.given = machine, settings, given
        shape = machine.shape
        config = deepspeed_config(settings, machine.accelerate)
        zero = Zero(config, shape.hidden)
        if settings["load_in_4bit"] and zero.stage == 3:
            raise NotPlanned("load_in_4bit", True, "under ZeRO-3 is not known to the plan", "use ZeRO-2")
        self.sequence = machine.prompt + settings["max_completion_length"]
        sizes = partial(devices.tensor_parallel, machine, settings, machine.gpus - 1)
        self.layout = devices.arrange(settings, machine.gpus, sizes, partial(batch.divides, settings, given))
        self.batch = batch.plan(settings, given, self.layout.policy)
        work = largest(machine, settings, self.batch, zero.stage)
        precise = memory.precision(settings, zero, config)
        generates = self.layout.generation
        self.phases, self.main = memory.phases(machine, settings, zero, precise, self.batch, generates, work)
        self.peak_phase = max(self.phases, key=lambda phase: memory.total(self.phases[phase]))
        self.peak = memory.total(self.phases[self.peak_phase])
        if self.layout.server:
            # Without vllm_max_model_length, the server's context is as long as its memory allows (train/serve.py). The
            # plan asks for room for one sequence of this recipe.
            length = settings["vllm_max_model_length"] or self.sequence
            engine = {"vllm_tensor_parallel_size": self.layout.tensor_parallel, "vllm_max_model_length": length}
            share = int(memory.VLLM_SERVER_SHARE * machine.gpu_bytes) - memory.CONTEXT
            server = memory.vllm(shape, {**settings, **engine}, share, machine.prompt)
            self.phases["server"] = {**server, "CUDA_context": memory.CONTEXT}
        self.missing = [(needed - limit, line) for needed, limit, line in self._bounds() if needed > limit]
        self.problems = [line for _, line in self.missing]
        self.fits = not self.missing
        self.severity = sum(size for size, _ in self.missing), len(self.missing)

    def changed(self, changes: list[Json]) -> "Counted | None":
        """Return the plan with changed settings on the same machine, or None if it cannot be planned."""
        fields = {name: value for change in changes for name, value in change.items()}
        with suppress(ConfigError):
            return Counted(self.machine, resolve({**self.settings, **fields}), self.given | set(fields))
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
            needed = sum(size for term, size in self.phases["generation"].items() if term.startswith("vLLM"))
            tokens = memory.context_length(machine.shape, settings, machine.prompt)
            line = f"vLLM's share is {share / GB:.1f} GB, and its weights, overhead and one sequence of {tokens} tokens"
            yield needed, share, f"{line} take {needed / GB:.1f}"
        longest = min(machine.shape.max_tokens or self.sequence, settings["vllm_max_model_length"] or self.sequence)
        line = f"prompt and completion come to {self.sequence} tokens, and the model is given {longest}"
        # A byte short for any number of tokens: halving them is no progress.
        yield self.sequence > longest, 0, line

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
    ``offline``: do not use the Hub and do not measure. Raises `UserError` if the recipe cannot be planned.

    >>> lora = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0}
    >>> recipe = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "dtype": "bfloat16", **lora}
    >>> answer = plan(recipe, gpus=1, gpu_gb=24, cpu_gb=64)
    >>> answer["fits"], answer["layout"][0]["gpus"], round(answer["bytes"]["base_weights"] / GB, 2)
    (True, [0], 0.92)
    """
    name, counted = choose(recipe, configs or {"": None}, **machine)
    of_step = (counted.machine, counted.settings, counted.batch, counted.layout)
    timed = seconds.per_step(*of_step, card) if card and not counted.settings["use_cpu"] else None
    return {**counted.answer(), "suggestions": suggest(counted), "accelerate_config": name or None, "seconds": timed}


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
            plans.append((name, Counted(*_read(recipe, accelerate=accelerate, **machine), set(recipe))))
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
    offline: bool = False,
) -> tuple[Machine, Json]:
    settings = resolve(recipe)
    cpu_gb, says = cpu_gb or main_memory(), accelerate or {}
    if (kind := says.get("distributed_type")) in ("FSDP", "MEGATRON_LM"):
        raise NotPlanned("distributed_type", kind, "is not known to the plan", "plan with DDP or DeepSpeed")
    if settings["use_cpu"]:
        # On a CPU the processes share main memory: it takes the place of a GPU's memory.
        gpus, gpu_gb = int(says.get("num_processes", 1)), cpu_gb
    elif gpus is None or gpu_gb is None:
        available, size = count_and_gb()
        gpus, gpu_gb, option = gpus or available, gpu_gb or size, "gpu_memory" if gpus else "gpus"
        if not available:
            raise ConfigError(option, None, "is not given, and this machine has no GPU", "use --gpus 1 --gpu_memory 24")
    name = settings["model_name_or_path"]
    shape = shape_of(str(name), read_config(name, settings["model_revision"], offline), measures=not offline)
    left = (settings["vllm_max_model_length"] or 0) - settings["max_completion_length"]
    prompt = prompt_tokens or (left if left > 0 else PROMPT_TOKENS)
    return Machine(shape, gpus, int(gpu_gb * GB), int(cpu_gb * GB), prompt, accelerate), settings


# Suggested changes

# Fields that change nothing on a CPU.
OF_A_GPU = {"dtype", "activation_offloading", "optim", "load_in_4bit", "use_vllm"}


def candidates(counted: Counted) -> list[list[Json]]:
    """Return changes that can save memory, cheapest first: for each, the values to try. A change is recipe fields.

    Free changes come first, then those that cost speed, then those that change what is learned.
    """
    s, sequence = counted.settings, counted.sequence
    whole = s["max_tokens_per_micro_batch"] or counted.batch.rows * sequence
    budgets = [] if counted.given & WHOLE else [whole // 2**k for k in range(1, 8)]
    asleep = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_max_model_length": sequence,
    }
    choices: list[list[Json]] = [
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
        [] if s["load_in_4bit"] else [{"load_in_4bit": True, "use_bnb_nested_quant": True}],
        [{"use_peft": True, "lora_target_modules": "all-linear"}],
        # transformers keeps the keys and values of all rows. vLLM computes as many rows at a time as its cache takes.
        [] if s["use_vllm"] else [asleep],
        [{"use_vllm": False}],
        [{"max_completion_length": max(256, s["max_completion_length"] // 2)}],
    ]
    if s["use_cpu"]:
        return [changes for changes in choices if not any(OF_A_GPU & change.keys() for change in changes)]
    return choices


def suggest(counted: Counted) -> list[Json]:
    """Return changes that together make the recipe fit: the cheapest ones, and none that is not needed.

    ``saves_gb`` is the drop of the peak after the changes before it. If all changes together are not enough, the last
    one still has ``fits: false``.
    """
    chosen, now = list[Json](), counted
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
    steps = [counted, *(counted.changed(chosen[:number]) or counted for number in range(1, len(chosen) + 1))]
    return [
        {
            "set": [f"{k}: {v if isinstance(v, str) else json.dumps(v)}" for k, v in change.items()],
            "change": change,
            "saves_gb": round((before.peak - after.peak) / GB, 3),
            "fits": after.fits,
        }
        for change, (before, after) in zip(chosen, pairwise(steps), strict=True)
    ]
