"""GPUs -> who runs where: the policy's processes, and vLLM beside them or on GPUs of its own. Pure.

Does not start anything, and does not change what the recipe says: `arrange` serves the recipe, `recommend` says what
would suit these GPUs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError
from grpo_math.planner.memory import VLLM_OVERHEAD, VLLM_SERVER_SHARE, sequence_bytes, weights
from grpo_math.planner.model import Shape


class Layout(NamedTuple):
    """``policy`` GPUs train, one process each; ``server`` GPUs generate, in groups of ``tensor_parallel``."""

    generation: str  # transformers, colocate or server
    policy: int
    server: int
    tensor_parallel: int
    why: str

    def roles(self) -> list[dict[str, Any]]:
        """Each GPU once.

        >>> Layout("server", 2, 2, 2, "").roles()
        [{'role': 'vLLM server, tensor parallel 2', 'gpus': [0, 1]}, {'role': 'policy', 'gpus': [2, 3]}]
        """
        roles: list[dict[str, Any]] = []
        if self.generation == "server":
            name = "vLLM server" + (f", tensor parallel {self.tensor_parallel}" if self.tensor_parallel > 1 else "")
            parallel = self.server // self.tensor_parallel
            name += f", data parallel {parallel}" if parallel > 1 else ""
            roles.append({"role": name, "gpus": list(range(self.server))})
        role = {"colocate": "policy and vLLM", "transformers": "policy, and generation by transformers"}
        first = self.server
        gpus = list(range(first, first + self.policy))
        return [*roles, {"role": role.get(self.generation, "policy"), "gpus": gpus}]


def arrange(
    shape: Shape, settings: Mapping[str, Any], gpus: int, gpu_bytes: int, prompt: int, divides: Callable[[int], bool]
) -> Layout:
    """The layout that the recipe asks for on ``gpus`` GPUs; ``divides(n)``: the batch comes out even on n processes.

    A server gets as many GPUs as it needs to hold the weights and one sequence; the policy gets as many of the rest as
    the batch divides by; what remains goes to the server, as data parallel ranks.
    """
    tp = settings["vllm_tensor_parallel_size"]
    if not settings["use_vllm"]:
        return Layout("transformers", gpus, 0, 1, "use_vllm is false: every GPU trains, and generates its own share")
    if settings["vllm_mode"] == "colocate":
        if gpus % tp or shape.heads % tp:
            reason = f"does not divide {gpus} GPUs and {shape.heads} heads"
            raise ConfigError("vllm_tensor_parallel_size", tp, reason, "use 1")
        sleeps = "sleeps in an update" if settings["vllm_enable_sleep_mode"] else "keeps its share in an update"
        return Layout("colocate", gpus, 0, tp, f"vllm_mode is colocate: vLLM shares each GPU, and {sleeps}")
    if gpus < 2:
        reason = "needs a GPU of its own, and there is one"
        raise ConfigError("vllm_mode", "server", reason, "set vllm_mode to colocate, with vllm_enable_sleep_mode")
    return _server(shape, settings, gpus, gpu_bytes, prompt, divides)


def _server(
    shape: Shape, settings: Mapping[str, Any], gpus: int, gpu_bytes: int, prompt: int, divides: Callable[[int], bool]
) -> Layout:
    need = tensor_parallel(shape, settings, gpu_bytes, prompt, gpus - 1)
    for policy in range(gpus - need, 0, -1):
        if (gpus - policy) % need == 0 and divides(policy):
            break
    else:
        policy = (gpus - need) // need * need or gpus - need
    server = gpus - policy
    held = "one GPU holds" if need == 1 else f"{need} GPUs together hold"
    why = f"{held} the server's weights and a sequence; the batch divides by {policy} for the policy"
    return Layout("server", policy, server, need, why)


def tensor_parallel(shape: Shape, settings: Mapping[str, Any], gpu_bytes: int, prompt: int, most: int) -> int:
    """The fewest GPUs that hold the weights and a sequence: a power of two that divides the heads, at most ``most``."""
    tokens = settings["vllm_max_model_length"] or prompt + settings["max_completion_length"]
    of_server = {**settings, "cast_lm_head_to_fp32": False, "vllm_max_model_length": tokens}
    held = sum(weights(shape, of_server, 2).values()) + sequence_bytes(shape, of_server, prompt)
    choices = [tp for tp in (1, 2, 4, 8) if tp <= max(1, most) and shape.heads % tp == 0]
    fits = [tp for tp in choices if held / tp + VLLM_OVERHEAD <= VLLM_SERVER_SHARE * gpu_bytes]
    return fits[0] if fits else choices[-1]


def recommend(gpus: int, tokens: int) -> list[dict[str, Any]]:
    """Settings to try on so many GPUs, fastest first; ``tokens``: the longest prompt and completion.

    One GPU: vLLM beside the policy, asleep in an update, with the largest share that there is room for; transformers
    where there is room for none. Several: a server, so that neither waits for the other's memory.
    """
    beside = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": tokens,
        "vllm_enable_sleep_mode": True,
    }
    shares = (0.6, 0.5, 0.4, 0.3, 0.2)
    sleeping = [{**beside, "vllm_gpu_memory_utilization": share} for share in shares]
    server = [{"use_vllm": True, "vllm_mode": "server", "vllm_max_model_length": tokens}] if gpus > 1 else []
    return [*server, *sleeping, {"use_vllm": False}]


def here() -> tuple[int, float]:
    """(GPUs of this machine, GB of the smallest), as nvidia-smi says; (0, 0.0) where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10)
        sizes = [int(line) for line in said.stdout.split()]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 0, 0.0
    return len(sizes), min(sizes, default=0) / 1024
