"""The number formats that a GPU computes in. `grpo-math doctor` and `grpo-math plan` share these rules."""

from collections.abc import Mapping
from typing import Any

from grpo_math.errors import ConfigError

BFLOAT16_SINCE = 8.0  # compute capability: Ampere
# The settings of a GPU without bfloat16.
FLOAT32: dict[str, Any] = {"dtype": "float32", "bf16": False}


def has_bfloat16(capability: float | None) -> bool:
    """Return True if a GPU of this compute capability computes in bfloat16, or if the capability is unknown.

    transformers also counts GPUs that emulate bfloat16 (T4, V100).
    """
    return capability is None or capability >= BFLOAT16_SINCE


def bfloat16_errors(settings: Mapping[str, Any], capability: float | None) -> list[ConfigError]:
    """Return an error for each setting that needs bfloat16, if the GPU lacks it.

    >>> print(*bfloat16_errors({"bf16": None, "dtype": "bfloat16"}, 7.5))
    dtype='bfloat16' needs a GPU of compute capability 8.0 or more, and this one has 7.5: set dtype to float32 and \
bf16 to false
    >>> bfloat16_errors({"bf16": True, "dtype": "bfloat16"}, 8.0)
    []
    """
    if has_bfloat16(capability):
        return []
    reason = f"needs a GPU of compute capability {BFLOAT16_SINCE} or more, and this one has {capability}"
    uses = {"bf16": settings["bf16"], "dtype": settings["dtype"] == "bfloat16"}
    remedy = "set dtype to float32 and bf16 to false"
    return [ConfigError(name, settings[name], reason, remedy) for name, used in uses.items() if used]
