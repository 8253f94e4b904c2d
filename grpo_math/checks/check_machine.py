"""Checks of the machine: versions, devices and number formats, memory, disk, and the run's folder.

nvidia-smi lists the GPUs, so torch is not imported.
"""

import importlib.util
import os
import shutil
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from math import ceil, inf
from pathlib import Path
from typing import Any

from packaging.version import Version

from grpo_math import planner
from grpo_math.checks.check_model import sampled_lengths
from grpo_math.checks.setup import Setup, as_finding
from grpo_math.errors import ConfigError, Finding, UserError, require_choice
from grpo_math.generation import dtypes
from grpo_math.generation.vllm_env import PLUGIN, needed_in_training
from grpo_math.planner import memory
from grpo_math.planner.settings import NotPlanned, resolve
from grpo_math.run import checkpoints, resume
from grpo_math.run.files import existing, unwritable
from grpo_math.settings.accelerate import OFFLOAD, deepspeed_config
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system import gpus, machine
from grpo_math.system.gpus import capabilities, count_and_gb
from grpo_math.trainer import contract

# Parts of the names of the optimizers that transformers takes from bitsandbytes.
BITSANDBYTES = ("bnb", "8bit", "paged", "lion", "ademamix")
UNPLANNED = ("vllm_mode", "model_name_or_path")  # a run may train although the plan raises an error about these
# vLLM pins other versions of packages that training uses, so pip would break this environment.
INSTALL = {
    "vllm": 'in a new environment, pip install -c constraints-vllm.txt -e ".[vllm]"',
    PLUGIN: f'pip install {PLUGIN}, or pip install "vllm<0.28"',
}
LOCKED = 10  # minutes, in which an extension of DeepSpeed is compiled
# A name with a slash is a kernel that transformers downloads.
ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")


def versions(setup: Setup) -> Iterator[Finding]:
    """Packages have a version of the supported range, and those that this run needs are installed."""
    s = setup.settings
    # This package overrides private methods of TRL, so that another minor version may break it.
    installed, for_vllm = machine.versions(), needed_in_training(s)
    colocated = s.generation == "colocate"
    newer = Version(installed.get("vllm", "0.28")) >= Version("0.28")
    # transformers takes the 8-bit optimizers from bitsandbytes.
    quantised = s.load_in_4bit or s.load_in_8bit or any(name in s.optim for name in BITSANDBYTES)
    needs = {
        "trl": ("every run", True),
        "vllm": ("use_vllm" if colocated else "sending all weights to a vLLM server", "vllm" in for_vllm),
        PLUGIN: ("load_in_4bit with vLLM 0.28 or newer", PLUGIN in for_vllm and newer),
        "deepspeed": ("DeepSpeed", in_deepspeed(setup)),
        "bitsandbytes": ("a model or an optimizer in 4 or 8 bit", quantised),
        "liger_kernel": ("use_liger_kernel", s.use_liger_kernel),
    }
    needed = {name: why for name, (why, applies) in needs.items() if applies}
    for name in dict.fromkeys([*needed, *machine.supported()]):
        required = machine.supported().get(name)
        # The name without the marker of an extra, which pip refuses.
        remedy = INSTALL.get(name, f'pip install "{name}{required.specifier if required else ""}"')
        # A server needs a separate GPU.
        if name == "vllm" and colocated and count_and_gb()[0] > 1:
            remedy += ", or set vllm_mode: server"
        if name not in installed:
            if name in needed:
                yield Finding("error", f"{needed[name]} needs {name}, which is not installed", remedy)
        elif required and not required.specifier.contains(installed[name], prereleases=True):
            # pip installs such a version only without its dependencies, or after this package.
            message = f"{name} {installed[name]} is not a version that this works with ({required.specifier})"
            yield Finding("error" if name in needed else "warning", message, remedy)
    yield from (Finding("error", each.line, each.install) for each in contract.untested() if each.gone)


def untested_versions(setup: Setup) -> Iterator[Finding]:
    """The installed packages are those that were tested, or the self-test has tried what differs."""
    has_passed = contract.passed().exists()
    for comparison in contract.untested():
        left = comparison.without(contract.tried())
        if not left.gone and (left.changed or not has_passed):
            remedy = left.install if has_passed else f"grpo-math selftest, or {left.install}"
            yield Finding("warning" if left.changed else "info", left.line, remedy)
    if not has_passed and (newer := contract.newer()):
        yield Finding("warning", f"newer than tested: {', '.join(newer)}", "grpo-math selftest")


def usable_gpus(setup: Setup) -> Iterator[Finding]:
    """nvidia-smi lists every GPU, and the installed torch can use them."""
    if setup.on_cpu:
        return
    yield from gpus.warnings()
    if count_and_gb()[0]:
        refuse_unusable(setup)
    else:
        yield Finding("info", "there is no GPU here, so this runs on the CPU", "set use_cpu: true, if that is meant")


def refuse_unusable(setup: Setup) -> None:
    """Raise `ConfigError` if the run would use GPUs that the installed torch cannot use: it would train on the CPU."""
    if not setup.on_cpu and (unusable := gpus.unusable()):
        reason, remedy = unusable
        setup.refuse("use_cpu", True, f"needs a GPU that torch can use: {reason}", f"{remedy}, or set use_cpu: true")


def number_formats(setup: Setup) -> Iterator[Finding]:
    """bfloat16 and the attention kernel need a device or a package that has them."""
    s, known = setup.settings, () if setup.settings.use_cpu else capabilities()
    if known:
        # Reading the config of a model may use the network, and only float16 depends on the family.
        in_float16 = s.fp16 or not dtypes.has_bfloat16(min(known))
        family = setup.model_config.get("model_type", "") if in_float16 else ""
        if error := dtypes.dtype_error(s, min(known), family):
            raise error
    kernel = s.attn_implementation or "sdpa"
    if not {"/", "|"} & set(kernel):
        require_choice("attn_implementation", kernel, ATTENTION)
    lacks_package = kernel.startswith("flash") and not any(map(importlib.util.find_spec, ("flash_attn", "kernels")))
    setup.refuse("attn_implementation", lacks_package, "needs flash_attn", "use sdpa, or install it, or kernels")
    # bfloat16 has 8 bits of precision: a step below 1/256 of a weight is lost without a float32 copy of the weights.
    if s.dtype == "bfloat16" and not (s.use_peft or setup.has_copy):
        message = "dtype=bfloat16: AdamW's small steps are rounded away in weights that have no float32 copy"
        yield Finding("warning", message, "set dtype to auto or float32, or train with use_peft or DeepSpeed")


def launched(setup: Setup) -> None:
    """DeepSpeed's file exists and is JSON; DeepSpeed and FSDP have a launcher, which starts their processes."""
    s = setup.settings
    deepspeed_config(s.deepspeed, None)
    # With several GPUs, `grpo-math train` starts a launcher itself.
    if os.environ.get("RANK") or setup.launched > 1 or setup.accelerate or len(capabilities()) > 1:
        return
    for name in ("fsdp", "deepspeed"):
        reason = "needs processes that a launcher has started"
        setup.refuse(name, getattr(s, name), reason, "add --accelerate_config, or leave it out")


def in_deepspeed(setup: Setup) -> bool:
    by_accelerate = setup.accelerate.get("distributed_type") == "DEEPSPEED" or machine.launched_with("DEEPSPEED")
    return bool(setup.settings.deepspeed) or by_accelerate


def compilers(setup: Setup) -> Iterator[Finding]:
    """A GPU run has what compiles code at its first use: Triton for any GPU, and DeepSpeed if it offloads."""
    if setup.on_cpu or not count_and_gb()[0]:
        return
    config = deepspeed_config(setup.settings.deepspeed, setup.accelerate_config) or {}
    zero = config.get("zero_optimization", {})
    offloads = any((zero.get(part) or {}).get("device", "none") != "none" for part in OFFLOAD)
    missing = [] if _program("CC", "gcc", "clang") else ["a C compiler"]
    if offloads and not _program("CXX", "c++"):
        missing += ["a C++ compiler"]
    # Debian's own scheme has another folder. Triton takes this one, too.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    if not Path(sysconfig.get_path("include", scheme), "Python.h").exists():
        missing += ["Python.h"]
    if missing:
        who = "Triton and DeepSpeed compile" if offloads else "Triton compiles"
        message = f"training on a GPU needs {' and '.join(missing)}, with which {who} code at the first use"
        yield Finding("error", message, "install build-essential and python3-dev, or set CC and CXX")


def _program(variable: str, *usual: str) -> bool:
    """Return True if the compiler that an environment variable names, or a usual one without it, is installed."""
    named = os.environ.get(variable)
    return any(map(shutil.which, [named] if named else usual))


def compilation(setup: Setup) -> Iterator[Finding]:
    """No lock is left of a compilation that was killed: DeepSpeed would wait for it without an end."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # torch makes a folder for each extension.
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions")
    for lock in folder.rglob("lock") if in_deepspeed(setup) else ():
        # A compilation that ends removes its lock.
        with suppress(FileNotFoundError):
            minutes = (time.time() - lock.stat().st_mtime) / 60
            if minutes > LOCKED:
                message = f"{lock} is {minutes:.0f} minutes old: DeepSpeed waits until it is gone"
                yield Finding("warning", message, f"rm {lock}, if nothing is compiled now")


def layout(setup: Setup) -> Iterator[Finding]:
    """Policy and server can share the GPUs."""
    try:
        if count := setup.gpus[0]:
            planner.unplanned_layout(setup.settings, count)
    except ConfigError as error:
        # The GPUs of a server that the user starts may be hidden here.
        yield as_finding(error, "layout", "warning")


def memory_plan(setup: Setup) -> Iterator[Finding]:
    """The run fits, as `grpo-math plan` counts it, on a GPU or on a CPU."""
    if not count_and_gb()[0] and not setup.settings.use_cpu:
        yield Finding("info", "memory is not planned: there is no GPU here", "grpo-math plan --gpus N --gpu_memory GB")
        return
    planned_settings, described = hardware(setup)
    try:
        answer = planner.plan(planned_settings, setup.configs, **described, offline=True)
    except UserError as error:
        # Training needs no plan, and may still download the model. `layout` warns of too few GPUs.
        unknown = isinstance(error, NotPlanned) or getattr(error, "field", "vllm_mode") in UNPLANNED
        yield as_finding(error, "memory", "info" if unknown or setup.started else "error")
        return
    if answer["fits"]:
        config = f" with {answer['accelerate_config']}" if answer["accelerate_config"] else ""
        message = f"memory: {answer['peak_gb']:.1f} GB at the peak{config}, as planned for prompts of"
        yield Finding("info", f"{message} {answer['prompt_tokens']} tokens")
    else:
        changes = "; ".join(line for suggestion in answer["suggestions"] for line in suggestion["set"])
        smaller = "take a smaller model: no change of settings makes it fit"
        yield Finding("warning", f"memory: {'; '.join(answer['problems'])}", changes or smaller)


def hardware(setup: Setup) -> tuple[RunSettings, dict[str, Any]]:
    """Return the settings of the run and this machine, as `planner.plan` takes them."""
    s = setup.settings
    count, gpu_gb = (0, 0.0) if s.use_cpu else count_and_gb()
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", count or setup.processes))
    planned_settings, machines = s, -(-setup.processes // per_machine)
    # A server on the CPU, or one that the user has started, takes none of these GPUs.
    if setup.started or s.use_cpu:
        count = setup.processes
        planned_settings = s.derived(vllm_server_base_url=s.vllm_server_base_url or "started")
    # Plan with the prompts of this data, in place of the planner's assumption, and with the GPUs that were counted
    # above: the plan would start nvidia-smi again.
    return planned_settings, {
        "gpus": count or None,
        "gpu_gb": gpu_gb or None,
        "cpu_gb": machines * machine.main_memory(),
        "capability": None if s.use_cpu else min(capabilities(), default=None),
        "prompt_tokens": max(sampled_lengths(setup)),
    }


def disk(setup: Setup) -> Iterator[Finding]:
    """The disk has room for the final weights, and for the checkpoints that the run keeps."""
    s = setup.settings
    trained = memory.trainable(setup.shape, resolve(s))
    # The final weights are written while the last checkpoints still exist.
    width = 4 if s.use_peft else dtypes.number_formats(s, "float32").width
    checkpoint = width * trained
    if not s.save_only_model:
        # With a copy: 16-bit weights for transformers and for DeepSpeed, the float32 copy, and Adam's two moments.
        optimizer = memory.optimizer_bytes(trained, s.optim, width)
        checkpoint = 16 * trained if setup.has_copy and not s.use_peft else checkpoint + optimizer
    needed = width * trained + checkpoint * (0 if s.save_strategy == "no" else new_checkpoints(s))
    folder = existing(Path(str(s.output_dir)))
    free = shutil.disk_usage(folder).free
    if needed > free:
        message = f"what the run saves needs {machine.size(needed)}, and {folder} has {machine.size(free)} free"
        yield Finding("error", message, "name another output_dir, or make room")


def new_checkpoints(settings: RunSettings) -> int:
    """Return the most checkpoints that a run adds to those in its folder: the oldest is removed after the next is
    written.

    >>> fields = {"output_dir": "/nowhere", "max_steps": 200, "save_steps": 50}
    >>> [new_checkpoints(RunSettings({**fields, "save_total_limit": limit})) for limit in (1, 2, 9, None)]
    [2, 3, 4, 4]
    >>> new_checkpoints(RunSettings({"output_dir": "/nowhere"}))  # an unknown number
    1
    """
    s = settings
    kept = s.save_total_limit + 1 if s.save_total_limit else inf
    if s.save_strategy == "steps" and s.max_steps > 0:
        every = s.save_steps if s.save_steps >= 1 else s.save_steps * s.max_steps
        kept = min(kept, ceil(s.max_steps / every))
    return 1 if kept == inf else max(1, int(kept) - len(checkpoints.checkpoints(Path(str(s.output_dir)))))


def output_dir(setup: Setup) -> Iterator[Finding]:
    """Check that the output folder is writable and contains no run with other settings."""
    s = setup.settings
    name = s.output_dir
    folder = Path(name or "")
    if reason := unwritable(folder):
        raise ConfigError("output_dir", name, reason, "name another folder")
    named, run_dir, existing_run = resume.where_to_start(folder, s.resume_from_checkpoint)
    if named:
        checkpoints.checkpoint_step(named)
    known = isinstance((existing_run or {}).get("stated"), dict)
    # Another program made the checkpoint, so there is nothing to compare.
    if existing_run is None or (not known and named):
        return
    reason = "contains a run that cannot be continued: its config.yaml does not record the recipe"
    setup.refuse("output_dir", not known, reason, "name a new folder")
    # A resumed run ends with the weights of an uninterrupted one only if nothing that is computed has changed.
    lines = resume.changed(existing_run, s)
    resume.refuse_changed(run_dir, lines, s.resume)
    if named is None and (saved := checkpoints.checkpoints(folder)):
        yield Finding("info", f"continues the run in {name}, whose last checkpoint is of step {saved[0][0]}")
