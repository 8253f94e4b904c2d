"""The number formats that a GPU computes in. Training, `grpo-math doctor` and `grpo-math plan` share these rules.

A GPU without bfloat16 computes in float16, whose largest number is 65504 and whose gradients need a loss scale.
"""

import json
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.generation.names import overflow_report
from grpo_math.settings.run_settings import RunSettings

BFLOAT16_SINCE = 8.0  # compute capability: Ampere
FLOAT32: dict[str, Any] = {"dtype": "float32", "bf16": False, "fp16": False}


def has_bfloat16(capability: float | None) -> bool:
    """Return True if a GPU of this compute capability computes in bfloat16, or if the capability is unknown.

    transformers also counts GPUs that emulate bfloat16 (T4, V100).
    """
    return capability is None or capability >= BFLOAT16_SINCE


def auto_dtype(half: str, *, use_peft: bool, fp16: bool, has_copy: bool = False) -> str:
    """Return the format of the weights for ``dtype: auto`` on a device that computes in ``half``.

    ``has_copy``: DeepSpeed or FSDP keeps a float32 copy of trained weights. Without a copy, rounding removes AdamW's
    steps at a learning rate of 1e-6. torch's loss scale, which ``fp16`` turns on, refuses trained float16 weights.

    >>> auto_dtype("float16", use_peft=True, fp16=True), auto_dtype("float16", use_peft=False, fp16=True)
    ('float16', 'float32')
    >>> [auto_dtype("bfloat16", use_peft=False, fp16=False, **copy) for copy in ({}, {"has_copy": True})]
    ['float32', 'bfloat16']
    """
    frozen_or_copied = use_peft and fp16 if half == "float16" else use_peft or has_copy
    return half if frozen_or_copied else "float32"


def automatic(settings: RunSettings, capability: float | None) -> dict[str, Any]:
    """Return the settings that training chooses on a GPU without bfloat16, in place of ``auto`` and of an unset bf16.

    >>> automatic(RunSettings({"dtype": "auto", "use_peft": True}), 7.5)
    {'bf16': False, 'fp16': True, 'dtype': 'float16'}
    """
    if has_bfloat16(capability):
        return {}
    chosen: dict[str, Any] = {"bf16": False, "fp16": True} if settings.bf16 is None else {}
    if settings.dtype == "auto":
        fp16 = chosen.get("fp16", settings.fp16)
        chosen["dtype"] = auto_dtype("float16", use_peft=settings.use_peft, fp16=fp16)
    return chosen


def corrections(settings: RunSettings, capability: float | None, family: str = "") -> dict[str, Any]:
    """Return the settings to change because the GPU, or the model's family, cannot compute in their formats.

    >>> corrections(RunSettings({"dtype": "bfloat16", "bf16": True, "use_peft": True}), 7.5)
    {'dtype': 'auto', 'bf16': False, 'fp16': True}
    """
    trained = settings.derived(**automatic(settings, capability))
    if overflow_report(family) and (trained.fp16 or trained.dtype == "float16"):
        return FLOAT32
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
    """
    changes = corrections(settings, capability, family)
    if not changes:
        return None
    reason = f"needs a GPU of compute capability {BFLOAT16_SINCE} or more, and this one has {capability}"
    if changes is FLOAT32:
        reason = f"computes {family} in float16, in which its activations overflow ({overflow_report(family)})"
    name = next(iter(changes))
    remedy = ", ".join(f"{field}: {json.dumps(value)}".replace('"', "") for field, value in changes.items())
    return ConfigError(name, getattr(settings, name), reason, f"set {remedy}")
