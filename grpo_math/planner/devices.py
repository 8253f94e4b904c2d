"""GPUs -> who runs where: the policy's processes, and vLLM beside them or on GPUs of its own. Pure.

Does not start anything, and does not change what the recipe says: `arrange` serves the recipe, `recommend` says what
would suit these GPUs.
"""

import os
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError
from grpo_math.planner.memory import VLLM_OVERHEAD, VLLM_SERVER_SHARE, sequence_bytes, weights
from grpo_math.planner.model import Shape
from grpo_math.planner.settings import Settings


class Gpu(NamedTuple):
    """A GPU as nvidia-smi says: its number there, GB of memory, and who uses it ("" if nobody)."""

    number: int
    gb: float
    used_by: str


class Layout(NamedTuple):
    """``policy`` GPUs train, one process each; ``server`` GPUs generate, in groups of ``tensor_parallel``."""

    generation: str  # transformers, colocate or server
    policy: int
    server: int
    tensor_parallel: int
    why: str
    idle: int = 0

    @property
    def data_parallel(self) -> int:
        return self.server // self.tensor_parallel

    @property
    def name(self) -> str:
        """A short name, for a table: who generates, or how many GPUs the server has + how many the policy.

        >>> Layout("server", 4, 4, 2, "").name, Layout("server", 1, 1, 1, "").name, Layout("colocate", 2, 0, 1, "").name
        ('4+4 tp2', '1+1', 'colocate')
        """
        both = f"{self.server}+{self.policy}" + f" tp{self.tensor_parallel}" * (self.tensor_parallel > 1)
        return both if self.generation == "server" else self.generation

    def roles(self) -> list[dict[str, Any]]:
        """Each GPU once: the server's first, then the policy's.

        >>> Layout("server", 2, 2, 2, "").roles()
        [{'role': 'vLLM server, tensor parallel 2', 'gpus': [0, 1]}, {'role': 'policy', 'gpus': [2, 3]}]
        """
        name = "vLLM server" + f", tensor parallel {self.tensor_parallel}" * (self.tensor_parallel > 1)
        name += f", data parallel {self.data_parallel}" * (self.data_parallel > 1)
        own = {"colocate": "policy and vLLM", "transformers": "policy, and generation by transformers"}
        policy, idle = self.server, self.server + self.policy  # the first of each
        roles = [
            {"role": name, "gpus": list(range(policy))},
            {"role": "idle", "gpus": list(range(idle, idle + self.idle))},
            {"role": own.get(self.generation, "policy"), "gpus": list(range(policy, idle))},
        ]
        return [role for role in roles if role["gpus"]]


def arrange(
    shape: Shape, settings: Settings, gpus: int, gpu_bytes: int, prompt: int, divides: Callable[[int], bool]
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
        sleeps = "sleeps during updates" if settings["vllm_enable_sleep_mode"] else "keeps its share during updates"
        return Layout("colocate", gpus, 0, tp, f"vllm_mode is colocate: vLLM shares each GPU, and {sleeps}")
    if url := elsewhere(settings):
        return Layout("server", gpus, 0, 1, f"the server is at {url}: every GPU trains")
    if gpus < 2:
        reason = "needs a GPU of its own, and there is one"
        raise ConfigError("vllm_mode", "server", reason, "set vllm_mode to colocate, with vllm_enable_sleep_mode")
    need = tensor_parallel(shape, settings, gpu_bytes, prompt, gpus - 1)
    tried = [(policy, *server_ranks(shape, settings, gpus - policy, need)) for policy in range(gpus - need, 0, -1)]
    even = [found for found in tried if divides(found[0])]
    # As few idle GPUs as can be, then as many for the policy. If the batch suits no number, settings/batch.py says so.
    policy, server, tp = min(even or tried[:1], key=lambda found: (gpus - found[0] - found[1], -found[0]))
    held = "one GPU holds" if need == 1 else f"{need} GPUs together hold"
    why = f"{held} the server's weights and a sequence"
    why += f"; the batch divides by {policy} for the policy" if policy > 1 else ""
    why += f"; the server takes {tp}, since TRL sends weights to no data parallel ranks" if tp > need else ""
    if idle := gpus - policy - server:
        why += f"; {idle} stay idle, which neither the server's heads nor the batch divide by"
    return Layout("server", policy, server, tp, why, idle)


def uncounted(settings: Settings, gpus: int, divides: Callable[[int], bool]) -> Layout:
    """`arrange` for a model whose bytes the plan cannot count: the server gets as many GPUs as the recipe says.

    >>> uncounted({"use_vllm": True, "vllm_mode": "server", "vllm_tensor_parallel_size": 2}, 8, lambda n: n < 5).name
    '2+4 tp2'
    """
    why, tp = "the plan does not know this recipe's memory", settings.get("vllm_tensor_parallel_size", 1)
    if not settings.get("use_vllm") or settings.get("vllm_mode", "colocate") == "colocate":
        return Layout("colocate" if settings.get("use_vllm") else "transformers", gpus, 0, tp, why)
    if url := elsewhere(settings):
        return Layout("server", gpus, 0, 1, f"the server is at {url}: every GPU trains")
    if gpus <= tp:
        raise ConfigError("vllm_mode", "server", f"needs {tp} GPUs of {gpus} for itself", "set vllm_mode to colocate")
    policy = next((n for n in range(gpus - tp, 0, -1) if divides(n)), gpus - tp)
    if idle := gpus - tp - policy:
        why += f", and the batch does not divide by {policy + idle}"
    return Layout("server", policy, tp, tp, why, idle)


def elsewhere(settings: Settings) -> str:
    """Where the server is that somebody else started, as the recipe says; "" if the run has to start its own.

    >>> elsewhere({"vllm_server_base_url": "http://node1:8000"}), elsewhere({"vllm_server_host": "127.0.0.1"})
    ('http://node1:8000', '')
    """
    host = settings.get("vllm_server_host") or "0.0.0.0"
    own = host in ("0.0.0.0", "127.0.0.1", "localhost")
    return settings.get("vllm_server_base_url") or ("" if own else host)


def sends_adapter(settings: Settings) -> bool:
    """Whether the adapter alone goes to the server. Otherwise all weights do, over TRL's NCCL path."""
    return bool(settings["use_peft"]) and settings.get("vllm_sync", "adapter") == "adapter"


def server_ranks(shape: Shape, settings: Settings, gpus: int, need: int) -> tuple[int, int]:
    """(GPUs that a server can use of ``gpus``, tensor parallel size), where ``need`` GPUs hold the model.

    An adapter goes to data parallel copies alike. TRL's weight transfer knows none of a dense model (its
    vllm_serve.py), so tensor parallelism takes all it can.
    """
    if sends_adapter(settings):
        return gpus // need * need, need
    most = [tp for tp in _sizes(shape) if need <= tp <= gpus]
    return (most[-1], most[-1]) if most else (need, need)


def _sizes(shape: Shape) -> list[int]:
    return [tp for tp in (1, 2, 4, 8) if shape.heads % tp == 0]


def tensor_parallel(shape: Shape, settings: Settings, gpu_bytes: int, prompt: int, most: int) -> int:
    """The fewest GPUs that hold the weights and a sequence: a power of two that divides the heads, at most ``most``.

    ``vllm_tensor_parallel_size`` in the recipe is a lower bound.
    """
    stated = settings["vllm_tensor_parallel_size"]
    if stated not in _sizes(shape) or stated > most:
        reason = f"does not suit {shape.heads} heads and {most} GPU{'s' * (most > 1)} for the server"
        raise ConfigError("vllm_tensor_parallel_size", stated, reason, "leave it out")
    tokens = settings["vllm_max_model_length"] or prompt + settings["max_completion_length"]
    of_server = {**settings, "cast_lm_head_to_fp32": False, "vllm_max_model_length": tokens}
    held = sum(weights(shape, of_server, 2).values()) + sequence_bytes(shape, of_server, prompt)
    choices = [tp for tp in _sizes(shape) if stated <= tp <= most]
    fits = [tp for tp in choices if held / tp + VLLM_OVERHEAD <= VLLM_SERVER_SHARE * gpu_bytes]
    return fits[0] if fits else choices[-1]


def recommend(gpus: int, tokens: int) -> list[dict[str, Any]]:
    """Settings to try on so many GPUs, fastest first; ``tokens``: the longest prompt and completion.

    One GPU: vLLM beside the policy, asleep in an update, with the largest share that there is room for; transformers
    where there is room for none. Several: a server, so that neither waits for the other's memory.
    """
    asleep = {"vllm_enable_sleep_mode": True}
    beside = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": tokens, **asleep}
    sleeping = [{**beside, "vllm_gpu_memory_utilization": share} for share in (0.6, 0.5, 0.4, 0.3, 0.2)]
    server = [{"use_vllm": True, "vllm_mode": "server", "vllm_max_model_length": tokens}] if gpus > 1 else []
    return [*server, *sleeping, {"use_vllm": False}]


def here() -> tuple[int, float]:
    """(GPUs that this process may use, GB of the smallest); (0, 0.0) where there is none."""
    gpus = visible()
    return len(gpus), min((gpu.gb for gpu in gpus), default=0.0)


def visible() -> list[Gpu]:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES leaves, in its order; none where nvidia-smi says nothing.

    As CUDA does, what follows a name that is none is left out. A GPU counts as used where nvidia-smi lists a process on
    it, or, as in a container that hides them, where more than a tenth of its memory is taken.
    """
    try:
        rows = ask("gpu=index,uuid,memory.total,memory.used")
        processes = ask("compute-apps=gpu_uuid,pid")
        gpus = {}
        for index, uuid, total, used in rows:
            pids = ", ".join(pid for where, pid in processes if where == uuid)
            taken = int(used) / 1024 if used.isdigit() and int(used) > int(total) / 10 else 0
            by = f"process {pids}" if pids else f"something that holds {taken:.1f} GB" if taken else ""
            gpus[uuid] = Gpu(int(index), int(total) / 1024, by)
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    if (wanted := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return list(gpus.values())
    chosen: list[Gpu] = []
    for name in wanted.split(","):
        name = name.strip()
        found = [gpu for uuid, gpu in gpus.items() if name == str(gpu.number) or (name and uuid.startswith(name))]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return chosen


def ask(query: str) -> list[list[str]]:
    """Rows of two columns or more that nvidia-smi answers with. Raises OSError or SubprocessError without it."""
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return [[word.strip() for word in line.split(",")] for line in said.splitlines() if "," in line]
