"""Checks of the machine: versions, devices and number formats, memory, disk, and the run's folder.

Does not import torch: nvidia-smi lists the GPUs.
"""

import importlib.util
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from grpo_math import planner
from grpo_math.checks.prompts import lengths_of
from grpo_math.checks.setup import CheckResult, Setup
from grpo_math.errors import ConfigError, UserError, one_of
from grpo_math.planner import devices, memory
from grpo_math.planner.settings import resolve
from grpo_math.reading import home
from grpo_math.run import checkpoints, lock, resume
from grpo_math.run.files import existing, read_only
from grpo_math.run.machine import GB
from grpo_math.run.weights import launched_with
from grpo_math.settings import fields, rules
from grpo_math.settings.accelerate import deepspeed_config
from grpo_math.settings.rules import LEAVE
from grpo_math.tools import read_tools, sandbox
from grpo_math.tools.limits import read_limits
from grpo_math.tools.python import server

ALWAYS = ("torch", "trl", "transformers", "accelerate", "peft", "datasets")
BFLOAT16_SINCE = 8.0  # compute capability: Ampere
WITH_COPY = ("DEEPSPEED", "FSDP")  # keep a float32 copy of bfloat16 weights
# Files with the weights of a checkpoint: of a model or an adapter, of DeepSpeed, and of FSDP
WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "global_step*", "*_fsdp*")
# The package of each attention implementation. A name with a slash is a kernel that transformers downloads.
ATTENTION = {
    **dict.fromkeys(("eager", "sdpa", "flex_attention")),
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn",
}


@cache
def supported() -> dict[str, Requirement]:
    """Return the supported range of each package, from the checkout's pyproject.toml or the installed metadata."""
    checkout = Path(__file__).parents[2] / "pyproject.toml"
    if checkout.exists():
        project = tomllib.loads(checkout.read_text(encoding="utf-8"))["project"]
        lines = [*project["dependencies"], *(x for extra in project["optional-dependencies"].values() for x in extra)]
    else:
        lines = metadata.requires("grpo_math") or []
    return {required.name: required for required in map(Requirement, lines) if required.specifier}


def versions(setup: Setup) -> Iterator[CheckResult]:
    """The packages that this run needs are there, in a version of the range that pyproject.toml states."""
    s = setup.settings
    needed: dict[str, str] = dict.fromkeys(ALWAYS, "every run")
    if s["use_vllm"] and s["vllm_mode"] == "colocate":
        needed["vllm"] = "use_vllm"
    if s["deepspeed"] or _kind(setup) == "DEEPSPEED" or launched_with("DEEPSPEED"):
        needed["deepspeed"] = "DeepSpeed"
    bits = [name for name in ("load_in_4bit", "load_in_8bit") if s[name]]
    if bits or "bnb" in s["optim"] or s["optim"].endswith("_8bit"):
        needed["bitsandbytes"] = bits[0] if bits else f"optim={s['optim']}"
    for name, why in needed.items():
        required = supported().get(name)
        # vLLM needs older versions of packages that training uses, so pip would break this environment.
        separate = "set vllm_mode: server, whose vLLM has its own environment: grpo-math serve --make_env"
        remedy = separate if name == "vllm" else f'pip install "{required or name}"'
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield CheckResult("error", f"{why} needs {name}, which is not installed", remedy)
            continue
        if required and not required.specifier.contains(installed, prereleases=True):
            message = f"{name} {installed} is not a version that this works with ({required.specifier})"
            yield CheckResult("error", message, remedy)
    no_liger = s["use_liger_kernel"] and not importlib.util.find_spec("liger_kernel")
    setup.refuse("use_liger_kernel", no_liger, "needs liger_kernel, which is not installed", LEAVE)


def _kind(setup: Setup) -> Any:
    """Return the distributed type that the accelerate config names."""
    return (setup.accelerate or {}).get("distributed_type")


@cache
def capabilities() -> tuple[float, ...]:
    """Return each GPU's compute capability, from nvidia-smi; () without a GPU, or if CUDA_VISIBLE_DEVICES is empty."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "x").strip() in ("", "-1"):
        return ()
    try:
        return tuple(float(capability) for _, capability in devices.ask("gpu=index,compute_cap"))
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


def number_formats(setup: Setup) -> Iterator[CheckResult]:
    """bfloat16 and the attention kernel need a device or a package that has them."""
    s, gpus = setup.settings, () if setup.settings["use_cpu"] else capabilities()
    launched = (setup.accelerate or {}).get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION")
    if launched == "fp16" and not s["allow_float16"]:
        raise ConfigError("mixed_precision", launched, rules.NAN, "use bf16 or no, or add allow_float16: true")
    old = f"needs a GPU of compute capability 8.0 or more, and this one has {min(gpus, default=0)}"
    is_old, float32 = min(gpus, default=BFLOAT16_SINCE) < BFLOAT16_SINCE, "set dtype to float32 and bf16 to false"
    setup.refuse("bf16", is_old and s["bf16"], old, float32)
    setup.refuse("dtype", is_old and s["dtype"] == "bfloat16", old, float32)
    no_gpu = not gpus and not s["use_cpu"]
    setup.refuse("bf16", no_gpu and s["bf16"], "needs a GPU, and none is visible", "set bf16: false, or use_cpu: true")
    # On a CPU bitsandbytes drops a scale that DoRA's norm needs.
    dora_on_cpu = s["load_in_8bit"] and s["use_dora"] and not gpus
    setup.refuse("use_dora", dora_on_cpu, "cannot be trained in 8 bit on a CPU", "use load_in_4bit, or leave it out")
    kernel = s["attn_implementation"]
    if kernel and not {"/", "|"} & set(kernel):
        one_of("attn_implementation", kernel, tuple(ATTENTION))
    package = ATTENTION.get(kernel)
    lacks_package = package and not any(map(importlib.util.find_spec, (package, "kernels")))
    setup.refuse("attn_implementation", lacks_package, f"needs {package}", "use sdpa, or install it, or kernels")
    copied = s["use_peft"] or s["deepspeed"] or s["fsdp"] or _kind(setup) in WITH_COPY
    if s["dtype"] == "bfloat16" and not copied and not any(map(launched_with, WITH_COPY)):
        message = "dtype=bfloat16: AdamW's small steps are rounded away in weights that have no float32 copy"
        yield CheckResult("warning", message, "set dtype to auto or float32, or train with use_peft or DeepSpeed")
    if no_gpu:
        yield CheckResult(
            "info", "there is no GPU here, so this runs on the CPU", "set use_cpu: true, if that is meant"
        )


def launched(setup: Setup) -> Iterator[CheckResult]:
    """DeepSpeed's file exists and is JSON; it, FSDP and a backend have several processes, or a launcher."""
    s = setup.settings
    deepspeed_config(s, None)
    if os.environ.get("RANK") or setup.processes > 1 or setup.accelerate or len(capabilities()) > 1:
        return
    for name in ("fsdp", "ddp_backend", "deepspeed"):
        finds_peers = name == "deepspeed" and importlib.util.find_spec("mpi4py")
        reason = "needs processes that a launcher has started"
        setup.refuse(name, s[name] and not finds_peers, reason, "add --accelerate_config, or leave it out")
    yield from ()


def memory_plan(setup: Setup) -> Iterator[CheckResult]:
    """The run fits, as `grpo-math plan` counts it, on a GPU or on a CPU."""
    s = setup.settings
    gpus, gpu_gb = (0, 0.0) if s["use_cpu"] else devices.here()
    if not gpus and not s["use_cpu"]:
        yield CheckResult(
            "info", "memory is not planned: there is no GPU here", "grpo-math plan --gpus N --gpu_memory GB"
        )
        return
    given = {name: s[name] for name in setup.given if name in s}
    launch = {"num_processes": setup.processes, **(setup.accelerate or {})}
    try:
        measured: dict[str, Any] = {"gpus": gpus or None, "gpu_gb": gpu_gb or None}
        measured["prompt_tokens"] = max(lengths_of(setup), default=None)
        answer = planner.plan(given, **measured, accelerate=launch, offline=True)
    except UserError as error:
        yield CheckResult("info", f"memory is not planned: {' '.join(str(error).split())}", "see grpo-math plan --help")
        return
    if answer["fits"]:
        prompts = f"prompts of {answer['assumed']['prompt_tokens']} tokens"
        yield CheckResult("info", f"memory: {answer['peak_gb']:.1f} GB at the peak, as planned for {prompts}")
    else:
        changes = "; ".join(line for suggestion in answer["suggestions"] for line in suggestion["set"])
        yield CheckResult("warning", f"memory: {'; '.join(answer['problems'])}", changes or "see grpo-math plan")


def checkpoint_bytes(setup: Setup) -> tuple[int, int]:
    """Return the bytes of one checkpoint, and the most bytes in the run's folder at a time, with the final weights.

    With saving off, only the final weights count.
    """
    s = setup.settings
    tensors = memory.trainable(setup.shape, resolve(s))
    width = 2 if s["dtype"] in ("bfloat16", "float16") and not s["use_peft"] else 4
    weights = width * sum(size * count for size, count in tensors)
    one = weights + (0 if s["save_only_model"] else memory.optimizer_bytes(tensors, s["optim"], width))
    if s["save_strategy"] in ("no", False):
        return one, weights
    steps, interval = s["max_steps"], s["save_steps"]
    count = int(steps / interval) if s["save_strategy"] == "steps" and steps > 0 and interval >= 1 else 2
    return one, max(1, min(count, s["save_total_limit"] or count)) * one + weights


def disk(setup: Setup) -> Iterator[CheckResult]:
    """The disk has room for the checkpoints that the run keeps."""
    try:
        one, kept = checkpoint_bytes(setup)
    except UserError as error:
        yield CheckResult("info", f"disk space is not checked: {error}", "see that there is room for the checkpoints")
        return
    folder = existing(Path(str(setup.settings["output_dir"])))
    free = shutil.disk_usage(folder).free
    if kept > free:
        message = f"checkpoints come to {kept / GB:.1f} GB, and {folder} has {free / GB:.1f} GB free"
        fewer = "name another output_dir" if kept <= 2 * one else "set save_total_limit: 1, or name another output_dir"
        yield CheckResult("error" if one > free else "warning", message, fewer)


def in_use(setup: Setup) -> Iterator[CheckResult]:
    """No other process trains in the run's folder."""
    name = setup.settings["output_dir"]
    if name and (owner := lock.owner(Path(name))):
        raise lock.in_use(Path(name), owner)
    yield from ()


def output_dir(setup: Setup) -> Iterator[CheckResult]:
    """The run's folder can be written, and holds no run of other settings."""
    s = setup.settings
    name, asked, model = s["output_dir"], s["resume_from_checkpoint"], str(s["model_name_or_path"])
    folder = Path(name or "")
    parent = existing(folder)
    another = "name another folder"
    setup.refuse("output_dir", not parent.is_dir(), f"is not a folder: {parent} is a file", another)
    setup.refuse("output_dir", read_only(parent), f"cannot be written: {parent} is read-only", another)
    of_model = name and model and os.path.realpath(folder) == os.path.realpath(home(model))
    setup.refuse("output_dir", of_model, "is the folder of the model", another)
    nothing = str(asked).lower() == "true" and not checkpoints.checkpoints(folder)
    setup.refuse("resume_from_checkpoint", nothing, f"finds no checkpoint in {folder}", LEAVE)
    named, run_dir = resume.source(folder, asked)
    if named:
        checkpoint = "give a checkpoint's folder, or true"
        setup.refuse("resume_from_checkpoint", not named.is_dir(), "is not a folder", checkpoint)
        checkpoints.step_of(named)
        no_weights = not any(next(named.glob(pattern), None) for pattern in WEIGHTS)
        setup.refuse("resume_from_checkpoint", no_weights, "has no weights", checkpoint)
    held = resume.config_of(run_dir)
    known = isinstance((held or {}).get("stated"), dict)
    if held is None or (not known and named):  # another program made the checkpoint, so there is nothing to compare
        return
    if not known:
        reason = "holds a run that cannot be continued, since its config.yaml does not say what it was"
        raise ConfigError("output_dir", name, reason, "name a new folder")
    defaults = {field.name: field.default for field in fields.fields().values()}
    resume.refuse_changed(run_dir, resume.changed(held, s, setup.given, defaults), s["resume"])
    if named is None and (saved := checkpoints.checkpoints(folder)):
        yield CheckResult("info", f"continues the run in {name}, whose last checkpoint is of step {saved[0][0]}")


def python_tool(setup: Setup) -> Iterator[CheckResult]:
    """The kernel can sandbox the programs of the tool `python`, and one such program runs."""
    names = setup.settings.get("tools") or ()
    read_tools(names, read_limits(setup.settings.get("python") or {}))
    if "python" not in names:
        return
    sandbox.require_layers()
    server()  # raises if no process can be started
    landlock = sandbox.layers()["landlock"]
    yield CheckResult("info", f"the Python tool is sandboxed by Landlock {landlock}, seccomp and limits")
