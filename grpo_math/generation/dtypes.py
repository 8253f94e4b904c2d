"""The number formats that a run computes in. Training, evaluation, `grpo-math doctor` and `grpo-math plan` share these
rules.

A GPU without bfloat16 computes in float16, whose largest number is 65504 and whose gradients need a loss scale.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError
from grpo_math.generation.names import OVERFLOWING_IN_EAGER, overflow_report
from grpo_math.settings.run_settings import RunSettings

BFLOAT16_SINCE = 8.0  # compute capability: Ampere
FLOAT32: dict[str, Any] = {"dtype": "float32", "bf16": False, "fp16": False}
SDPA = {"attn_implementation": "sdpa"}


def has_bfloat16(capability: float | None) -> bool:
    """Return True if a GPU of this compute capability computes in bfloat16, or if the capability is unknown.

    transformers also counts GPUs that emulate bfloat16 (T4, V100).
    """
    return capability is None or capability >= BFLOAT16_SINCE


class NumberFormats(NamedTuple):
    """The format of the weights, and what autocast computes matrix products in: bfloat16, float16, or neither."""

    dtype: str | None
    bf16: bool
    fp16: bool

    @property
    def width(self) -> int:
        """Return the bytes of a weight."""
        return 2 if self.dtype in ("bfloat16", "float16") else 4


def number_formats(settings: RunSettings, half: str, *, has_copy: bool = False) -> NumberFormats:
    """Return the formats of a run on a device that computes in ``half``: bfloat16, float16, or float32 for neither.

    ``has_copy``: DeepSpeed or FSDP keeps a float32 copy of trained weights. Without a copy, rounding removes AdamW's
    steps at a learning rate of 1e-6. torch's loss scale, which ``fp16`` turns on, refuses trained float16 weights.

    >>> lora, full = RunSettings({"dtype": "auto", "use_peft": True}), RunSettings({"dtype": "auto"})
    >>> [number_formats(lora, half) for half in ("bfloat16", "float16")]  # an adapter on a frozen base
    [NumberFormats(dtype='bfloat16', bf16=True, fp16=False), NumberFormats(dtype='float16', bf16=False, fp16=True)]
    >>> number_formats(lora, "float32")  # a CPU
    NumberFormats(dtype='float32', bf16=False, fp16=False)
    >>> [number_formats(full, half).dtype for half in ("bfloat16", "float16")]  # all weights are trained
    ['float32', 'float32']
    >>> [number_formats(full, half, has_copy=True).dtype for half in ("bfloat16", "float16")]
    ['bfloat16', 'float32']
    >>> number_formats(RunSettings({"dtype": "bfloat16", "bf16": False}), "float16")  # what the recipe names stays
    NumberFormats(dtype='bfloat16', bf16=False, fp16=False)
    """
    bf16, fp16, dtype = settings.bf16, settings.fp16, settings.dtype
    if bf16 is None:
        bf16, fp16 = half == "bfloat16" and not fp16, fp16 or half == "float16"
    if dtype == "auto":
        frozen_or_copied = settings.use_peft and fp16 if half == "float16" else settings.use_peft or has_copy
        dtype = half if frozen_or_copied else "float32"
    return NumberFormats(dtype, bf16, fp16)


def corrections(settings: RunSettings, capability: float | None, family: str = "") -> dict[str, Any]:
    """Return the settings to change because the GPU, or the model's family, cannot compute in their formats.

    >>> corrections(RunSettings({"dtype": "bfloat16", "bf16": True, "use_peft": True}), 7.5)
    {'dtype': 'auto', 'bf16': False, 'fp16': True}
    """
    trained = number_formats(settings, "bfloat16" if has_bfloat16(capability) else "float16")
    if trained.fp16 or trained.dtype == "float16":
        if overflow_report(family):
            return FLOAT32
        if settings.attn_implementation == "eager" and overflow_report(family, OVERFLOWING_IN_EAGER):
            return SDPA
    if has_bfloat16(capability):
        return {}
    changes = {"dtype": "auto"} if settings.dtype == "bfloat16" else {}
    return {**changes, "bf16": False, "fp16": True} if settings.bf16 else changes


def dtype_error(settings: RunSettings, capability: float | None, family: str = "") -> ConfigError | None:
    """Return the error of settings that need `corrections`, with these as its remedy, or None.

    >>> settings = RunSettings({"dtype": "bfloat16", "use_peft": True})
    >>> print(dtype_error(settings, 7.5))
    dtype='bfloat16' needs a GPU of compute capability 8.0 or more, and this one has 7.5: set dtype: auto
    >>> print(dtype_error(settings.changed(dtype="auto"), 7.5, "gemma3"))
    dtype='auto' computes gemma3 in float16, in which its activations overflow \
(https://github.com/huggingface/transformers/issues/36822): set dtype: float32, bf16: false, fp16: false
    >>> dtype_error(settings, 8.0, "gemma3")
    >>> in_eager = settings.changed(dtype="auto", attn_implementation="eager")
    >>> print(dtype_error(in_eager, 7.5, "qwen2"), dtype_error(in_eager, 7.5, "qwen3"))
    attn_implementation='eager' computes qwen2 in float16, in which its activations overflow \
(https://github.com/QwenLM/Qwen3/issues/868): set attn_implementation: sdpa None
    """
    changes = corrections(settings, capability, family)
    if not changes:
        return None
    reason = f"needs a GPU of compute capability {BFLOAT16_SINCE} or more, and this one has {capability}"
    if changes in (FLOAT32, SDPA):
        report = overflow_report(family) or overflow_report(family, OVERFLOWING_IN_EAGER)
        reason = f"computes {family} in float16, in which its activations overflow ({report})"
    name = next(iter(changes))
    remedy = ", ".join(f"{field}: {json.dumps(value)}".replace('"', "") for field, value in changes.items())
    return ConfigError(name, getattr(settings, name), reason, f"set {remedy}")


def inference_dtype(path: str) -> str:
    """Return the format in which to load a model without training: `fast_dtype`, or float32 if float16 overflows."""
    from transformers import AutoConfig

    dtype = fast_dtype()
    if dtype == "float16" and overflow_report(AutoConfig.from_pretrained(path, trust_remote_code=False).model_type):
        return "float32"
    return dtype


def gpu_dtype() -> str:
    """Return the 16-bit format that the accelerator computes in, or ``float32`` without an accelerator.

    transformers also counts cards that emulate bfloat16 (T4, V100, RTX 20xx). They compute in float16.
    """
    import torch
    from transformers.utils import is_torch_bf16_gpu_available

    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return "bfloat16" if is_torch_bf16_gpu_available() else "float32"


def fast_dtype(use_cpu: bool = False) -> str:
    """Return `gpu_dtype` on a GPU, ``bfloat16`` on CPUs with bfloat16 instructions, and ``float32`` on other CPUs.

    bfloat16 is faster than float32 on a CPU with AVX512-BF16 or AMX, and slower on other CPUs.
    """
    import torch

    if torch.cuda.is_available() and not use_cpu:
        return gpu_dtype()
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text() if cpu.exists() else ""  # only on Linux
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"
