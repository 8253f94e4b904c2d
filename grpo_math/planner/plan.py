"""A recipe, GPUs -> the answer of `grpo-math plan`: does it fit, what is largest, what to change.

Reads this machine's GPUs and main memory only if the caller does not describe them.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.planner import devices, memory
from grpo_math.planner.memory_plan import MemoryPlan
from grpo_math.planner.model import model_shape, read_config
from grpo_math.planner.remedies import suggest
from grpo_math.planner.settings import Json, LaunchSettings, NotPlanned, resolve
from grpo_math.planner.work import Machine
from grpo_math.settings import batch
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.gpus import capabilities, count_and_gb, listing_problems
from grpo_math.system.machine import GB, main_memory

PROMPT_TOKENS = 512


def plan(recipe: RunSettings, configs: Mapping[str, LaunchSettings | None] | None = None, **machine: Any) -> Json:
    """Return the answer of `grpo-math plan --json`. GB are 2^30 bytes.

    ``gpus``, ``gpu_gb``: the number of GPUs and the memory of one; by default this machine's, ignored with ``use_cpu``.
    ``cpu_gb``: main memory, by default this machine's. ``prompt_tokens``: the longest prompt, by default
    ``vllm_max_model_length`` minus the completion length, or 512. ``configs``: the contents of accelerate configs
    by name, of which the first that fits is chosen. ``offline``: do not use the Hub and do not measure. Raises
    `UserError` if the recipe cannot be planned.

    >>> lora = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0}
    >>> recipe = RunSettings({"model_name_or_path": "Qwen/Qwen2.5-0.5B", "dtype": "bfloat16", **lora})
    >>> answer = plan(recipe, gpus=1, gpu_gb=24, cpu_gb=64)
    >>> answer["fits"], answer["layout"][0]["gpus"], round(answer["bytes"]["base_weights"] / GB, 2)
    (True, [0], 0.92)
    """
    configs = configs or {"": None}
    name, chosen = choose(recipe, configs, **machine)
    others = {other: content for other, content in configs.items() if other != name}
    return {**chosen.answer(), "accelerate_config": name or None, **suggest(chosen, others)}


def choose(recipe: RunSettings, configs: Mapping[str, LaunchSettings | None], **machine: Any) -> tuple[str, MemoryPlan]:
    """Return (name, plan) of the first of the accelerate ``configs`` that fits. If none fits, return the first one.

    ``machine``: as in `_read`. Raises the error of the first config. Later configs that cannot be planned are skipped.

    >>> recipe = RunSettings({"model_name_or_path": "Qwen/Qwen2.5-1.5B", "gradient_accumulation_steps": 8})
    >>> name, chosen = choose(recipe, {"multi_gpu": None, "zero2_offload": {"distributed_type": "DEEPSPEED",
    ...     "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"}}}, gpus=2, gpu_gb=24, cpu_gb=64)
    >>> name, chosen.fits, chosen.layout.generation
    ('zero2_offload', True, 'transformers')
    """
    plans: list[tuple[str, MemoryPlan]] = []
    for name, accelerate in configs.items():
        try:
            plans.append((name, MemoryPlan(*_read(recipe, accelerate=accelerate, **machine))))
        except ConfigError:
            if not plans:
                raise
        # A problem of lengths or number formats counts as one byte. No other config solves it.
        if plans[-1][1].severity[0] <= 2:
            break
    return plans[-1] if plans[-1][1].fits else plans[0]


def unplanned_layout(settings: RunSettings, gpus: int) -> devices.Layout:
    """Return the layout of a recipe whose memory cannot be computed. The recipe gives the size of the server."""
    size = settings.vllm_tensor_parallel_size
    return devices.assign_gpus(settings, gpus, lambda: (size, [size]), partial(batch.divides, settings))


def serve_layout(recipe: RunSettings, **machine: Any) -> tuple[devices.Layout, memory.Terms]:
    """Return the layout with all GPUs of a machine for the server, and the terms of one of these GPUs.

    ``machine``: as in `_read`.

    >>> lora = RunSettings({"model_name_or_path": "Qwen/Qwen2.5-7B", "use_peft": True})
    >>> serve_layout(lora, gpus=4, gpu_gb=24)[0].roles()[0]
    {'role': 'vLLM server, data parallel 4', 'gpus': [0, 1, 2, 3]}
    >>> serve_layout(lora.changed(model_name_or_path="Qwen/Qwen2.5-32B"), gpus=8, gpu_gb=40)[0][:4]
    ('server', 0, 8, 2)
    >>> full, terms = serve_layout(RunSettings({"model_name_or_path": "Qwen/Qwen2.5-32B"}), gpus=6, gpu_gb=80)
    >>> full.server, full.tensor_parallel, full.idle, round(memory.total(terms) / GB)
    (4, 4, 2, 72)
    """
    served, settings = _read(recipe, **machine)
    need, sizes = devices.tensor_parallel(served, settings, served.gpus)
    server, tp = devices.server_ranks(settings, served.gpus, need, sizes)
    layout = devices.Layout("server", 0, server, tp, "the server has all GPUs", served.gpus - server)
    return layout, memory.server(served, settings, tp)


def _read(
    recipe: RunSettings,
    *,
    gpus: int | None = None,
    gpu_gb: float | None = None,
    cpu_gb: float | None = None,
    prompt_tokens: int | None = None,
    accelerate: LaunchSettings | None = None,
    capability: float | None = None,
    offline: bool = False,
) -> tuple[Machine, RunSettings]:
    cpu_gb, config = cpu_gb or main_memory(), accelerate or {}
    if (kind := config.get("distributed_type")) in ("FSDP", "MEGATRON_LM"):
        raise NotPlanned("distributed_type", kind, "is not known to the plan", "plan with DDP or DeepSpeed")
    if on_cpu := recipe.use_cpu:
        # On a CPU the processes share main memory: it takes the place of a GPU's memory.
        gpus, gpu_gb = int(config.get("num_processes", 1)), cpu_gb
    elif gpus is None or gpu_gb is None:
        available, size = count_and_gb()
        if gpu_gb is None and capability is None:
            capability = min(capabilities(), default=None)
        gpus, gpu_gb, option = gpus or available, gpu_gb or size, "gpu_memory" if gpus else "gpus"
        if not available:
            raise ConfigError(
                option,
                None,
                f"is not given, and this machine has no GPU{listing_problems()}",
                "use --gpus 1 --gpu_memory 24",
            )
    settings = resolve(recipe, None if on_cpu else capability)
    name = settings.model_name_or_path
    model_config = read_config(name, settings.model_revision, offline)
    shape = model_shape(str(name), model_config, measures=not offline)
    if settings.router_aux_loss_coef is None:
        # TRL's default is the value in the model's config.
        coefficient = model_config.get("router_aux_loss_coef", float(shape.active < shape.total))
        settings = settings.derived(router_aux_loss_coef=coefficient)
    teacher: Any = settings.reference_model
    if teacher:
        teacher = model_shape(str(teacher), read_config(teacher, offline=offline), measures=not offline)
    left = (settings.vllm_max_model_length or 0) - settings.max_completion_length
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
        model_config.get("model_type", ""),
    )
    return machine, settings
