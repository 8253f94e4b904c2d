"""Checks of the machine: versions, devices and number formats, memory, disk, the folder that the run writes to.

Does not import torch: GPUs are asked for through nvidia-smi.
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

from packaging.requirements import Requirement

from grpo_math import planner
from grpo_math.checks.prompts import longest_prompt
from grpo_math.checks.setup import Said, Setup
from grpo_math.errors import ConfigError, UserError, one_of
from grpo_math.planner import devices, memory
from grpo_math.planner.settings import resolve
from grpo_math.reading import home
from grpo_math.run import checkpoints, lock, resume
from grpo_math.run.files import existing, read_only
from grpo_math.run.machine import GB
from grpo_math.settings import fields

ALWAYS = ("torch", "trl", "transformers", "accelerate", "peft", "datasets")
BFLOAT16_SINCE = 8.0  # compute capability: Ampere
# What a checkpoint holds: weights or an adapter, and those of DeepSpeed and of FSDP
WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json", "global_step*", "*_fsdp*")
# What an attention implementation needs; a name with a slash is a kernel that transformers fetches.
ATTENTION = {
    **dict.fromkeys(("eager", "sdpa", "flex_attention")),
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn",
}


@cache
def supported() -> dict[str, Requirement]:
    """The range of each package that pyproject.toml states: the checkout's, or the installed package's metadata."""
    checkout = Path(__file__).parents[2] / "pyproject.toml"
    if checkout.exists():
        project = tomllib.loads(checkout.read_text(encoding="utf-8"))["project"]
        lines = [*project["dependencies"], *(x for extra in project["optional-dependencies"].values() for x in extra)]
    else:
        lines = metadata.requires("grpo_math") or []
    return {found.name: found for found in map(Requirement, lines) if found.specifier}


def versions(setup: Setup) -> Iterator[Said]:
    """The packages that this run needs are there, in a version of the range that pyproject.toml states."""
    s = setup.settings
    needed: dict[str, str] = dict.fromkeys(ALWAYS, "every run")
    if s["use_vllm"] and s["vllm_mode"] == "colocate":
        needed["vllm"] = "use_vllm"
    asked = (setup.accelerate or {}).get("distributed_type") == "DEEPSPEED"
    if s["deepspeed"] or asked or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        needed["deepspeed"] = "DeepSpeed"
    bits = [name for name in ("load_in_4bit", "load_in_8bit") if s[name]]
    if bits or "bnb" in s["optim"] or s["optim"].endswith("_8bit"):
        needed["bitsandbytes"] = bits[0] if bits else f"optim={s['optim']}"
    for name, why in needed.items():
        wanted = supported().get(name)
        try:
            there = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Said("error", f"{why} needs {name}, which is not installed", f'pip install "{wanted or name}"')
            continue
        if wanted and not wanted.specifier.contains(there, prereleases=True):
            said = f"{name} {there} is not a version that this works with ({wanted.specifier})"
            yield Said("error", said, f'pip install "{wanted}"', {"installed": there})
    if s["use_liger_kernel"] and not importlib.util.find_spec("liger_kernel"):
        raise ConfigError("use_liger_kernel", True, "needs liger_kernel, which is not installed", "leave it out")


@cache
def capabilities() -> tuple[float, ...]:
    """The compute capability of each GPU, as nvidia-smi says; empty without one, or with CUDA_VISIBLE_DEVICES empty."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "x").strip() in ("", "-1"):
        return ()
    try:
        return tuple(float(capability) for _, capability in devices.ask("gpu=index,compute_cap"))
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


def number_formats(setup: Setup) -> Iterator[Said]:
    """float16 has to be asked for; bfloat16 needs a device that has it, and quantised weights an adapter."""
    s = setup.settings
    gpus = () if s["use_cpu"] else capabilities()
    nan = "has given NaN with accumulation on GPUs without bfloat16 (T4, V100)"
    asked = (setup.accelerate or {}).get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION")
    for name, value, remedy in (
        ("dtype", s["dtype"], "use auto (bfloat16 where the GPU has it, else float32), or add fp16 and allow_float16"),
        ("fp16", s["fp16"], "use bf16, or neither (float32), or add allow_float16: true"),
        ("mixed_precision", asked, "use bf16 or no, or add fp16 and allow_float16: true"),
    ):
        if value in ("float16", "fp16", True) and not s["allow_float16"]:
            raise ConfigError(name, value, nan, remedy)
    for name in ("bf16", "dtype"):
        if s[name] not in (True, "bfloat16"):
            continue
        if gpus and min(gpus) < BFLOAT16_SINCE:
            reason = f"needs a GPU of compute capability 8.0 or more, and this one has {min(gpus)}"
            raise ConfigError(name, s[name], reason, "set dtype to float32 and bf16 to false")
        if not gpus and not s["use_cpu"] and name == "bf16":
            yield Said("error", "bf16=True needs a GPU, and there is none", "set bf16 to false, or use_cpu to true")
    for name in ("load_in_4bit", "load_in_8bit"):
        if s[name] and not s["use_peft"]:
            raise ConfigError(name, True, "cannot be trained without an adapter", "set use_peft to true")
    if s["load_in_8bit"] and s["use_dora"] and not gpus:  # bitsandbytes drops a scale there that DoRA's norm needs
        raise ConfigError("use_dora", True, "cannot be trained in 8 bit on a CPU", "use load_in_4bit, or leave it out")
    for name in sorted(setup.given):
        if name.startswith(("bnb_4bit_", "use_bnb_")) and not s["load_in_4bit"]:
            raise ConfigError(name, s[name], "would be ignored without load_in_4bit", "leave it out")
    if not gpus and not s["use_cpu"]:
        yield Said("info", "there is no GPU here, so this runs on the CPU", "set use_cpu: true, if that is meant")
    kernel = s["attn_implementation"]
    if kernel and "/" not in kernel and "|" not in kernel:
        one_of("attn_implementation", kernel, tuple(ATTENTION))
        package = ATTENTION[kernel]
        if package and not any(map(importlib.util.find_spec, (package, "kernels"))):
            remedy = "use sdpa, or install it, or kernels"
            raise ConfigError("attn_implementation", kernel, f"needs the package {package}", remedy)


def memory_plan(setup: Setup) -> Iterator[Said]:
    """Does it fit, as `grpo-math plan` counts it: where there is a GPU, and on a CPU."""
    s = setup.settings
    gpus, gpu_gb = (0, 0.0) if s["use_cpu"] else devices.here()
    if not gpus and not s["use_cpu"]:
        yield Said("info", "memory is not planned: there is no GPU here", "grpo-math plan --gpus N --gpu_memory GB")
        return
    try:
        given = {name: s[name] for name in setup.given if name in s}
        launch, tokens = {"num_processes": setup.processes, **(setup.accelerate or {})}, longest_prompt(setup)
        answer = planner.plan(given, gpus=gpus or None, gpu_gb=gpu_gb or None, prompt_tokens=tokens, accelerate=launch)
    except UserError as error:
        yield Said("info", f"memory is not planned: {' '.join(str(error).split())}", "see grpo-math plan --help")
        return
    if answer["fits"]:
        prompts = f"prompts of {answer['assumed']['prompt_tokens']} tokens"
        yield Said("info", f"memory: {answer['peak_gb']:.1f} GB at the peak, as planned for {prompts}", "")
        return
    change = "; ".join(line for one in answer["suggestions"] for line in one["set"])
    yield Said("warning", f"memory: {'; '.join(answer['problems'])}", change or "see grpo-math plan", answer["bytes"])


def checkpoint_bytes(setup: Setup) -> tuple[int, int]:
    """(one checkpoint, all that the run keeps at a time with what it writes last); 0 checkpoints with saving off."""
    s = setup.settings
    settings = resolve(s)
    tensors = memory.trainable(setup.shape, settings)
    trained = sum(size * count for size, count in tensors)
    half = s["dtype"] in ("bfloat16", "float16") and not s["use_peft"]
    written = trained * (2 if half else 4)
    one = written + (0 if s["save_only_model"] else memory.optimizer_bytes(tensors, s["optim"], 2 if half else 4))
    count = 0
    if s["save_strategy"] not in ("no", False):
        steps, every = s["max_steps"], s["save_steps"]
        count = int(steps / every) if s["save_strategy"] == "steps" and steps > 0 and every >= 1 else 2
        count = max(1, min(count, s["save_total_limit"] or count))
    return one, count * one + written


def disk(setup: Setup) -> Iterator[Said]:
    """The disk has room for the checkpoints that the run keeps."""
    try:
        one, kept = checkpoint_bytes(setup)
    except UserError as error:
        yield Said("info", f"disk space is not checked: {error}", "see that there is room for the checkpoints")
        return
    folder = existing(Path(str(setup.settings["output_dir"])))
    free = shutil.disk_usage(folder).free
    if kept > free:
        level = "error" if one > free else "warning"
        said = f"checkpoints come to {kept / GB:.1f} GB, and {folder} has {free / GB:.1f} GB free"
        yield Said(level, said, "set save_total_limit: 1, or name another output_dir", {"one": one, "kept": kept})


def in_use(setup: Setup) -> Iterator[Said]:
    """No other process trains in the run's folder."""
    name = setup.settings["output_dir"]
    if name and (owner := lock.owner(Path(name))):
        raise lock.in_use(Path(name), owner)
    yield from ()


def output_dir(setup: Setup) -> Iterator[Said]:
    """The run's folder can be written, and holds no run of other settings."""
    s = setup.settings
    name, asked, model = s["output_dir"], s["resume_from_checkpoint"], str(s["model_name_or_path"])

    def refused(reason: str, remedy: str) -> ConfigError:
        return ConfigError("output_dir", name, reason, remedy)

    if not name:
        raise refused("is missing", "name the folder that the run writes to")
    folder = Path(name)
    if os.path.realpath(folder) == "/":
        raise refused("is the root of the file system", "name a folder of the run's own")
    there = existing(folder)
    if not there.is_dir():
        raise refused(f"is not a folder: {there} is a file", "name another folder")
    if read_only(there):
        raise refused(f"cannot be written: {there} is read-only", "name another folder")
    if folder.is_symlink() and not folder.exists():
        raise refused("is a link to a folder that is not there", "make that folder, or name another one")
    if model and os.path.realpath(folder) == os.path.realpath(home(model)):
        raise refused("is the folder of the model", "name a folder of the run's own")
    named, held_in = resume.source(folder, asked)
    if asked == "" or (named and not named.is_dir()):
        reason = "is not a folder" if asked else "is empty"
        raise ConfigError("resume_from_checkpoint", asked, reason, "give a checkpoint's folder, or true")
    if named:
        checkpoints.step_of(named)
        if not any(next(named.glob(pattern), None) for pattern in WEIGHTS):
            raise ConfigError("resume_from_checkpoint", asked, "holds no weights", "give a checkpoint's folder")
    held = resume.config_of(held_in)
    known = isinstance((held or {}).get("stated"), dict)
    if held is None or (not known and named):  # of another program: it is taken as it is
        return
    if not known:
        reason = "holds a run that cannot be continued, since its config.yaml does not say what it was"
        raise refused(reason, "name a new folder")
    defaults = {field.name: field.default for field in fields.fields().values()}
    resume.refuse_changed(held_in, resume.changed(held, s, setup.given, defaults), s["resume"])
    if named is None and (found := checkpoints.checkpoints(folder)):
        yield Said("info", f"goes on with the run in {name}, whose last checkpoint is of step {found[0][0]}", "")
