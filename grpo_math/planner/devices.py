"""The layout of GPUs: the policy's processes, and vLLM on the same GPUs or on separate ones.

`assign_gpus` returns the layout that the recipe asks for.
"""

from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from grpo_math.errors import ConfigError
from grpo_math.planner.memory import VLLM_OVERHEAD, VLLM_SERVER_SHARE, sequence_bytes, server_settings, weights
from grpo_math.planner.settings import Json
from grpo_math.planner.work import Machine
from grpo_math.settings.run_settings import RunSettings


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

    def roles(self) -> list[Json]:
        """Return the role of each GPU: the server's GPUs first, then the policy's.

        >>> Layout("server", 2, 2, 2, "").roles()
        [{'role': 'vLLM server, tensor parallel 2', 'gpus': [0, 1]}, {'role': 'policy', 'gpus': [2, 3]}]
        """
        server = "vLLM server" + f", tensor parallel {self.tensor_parallel}" * (self.tensor_parallel > 1)
        server += f", data parallel {self.data_parallel}" * (self.data_parallel > 1)
        policies = {"colocate": "policy and vLLM", "transformers": "policy, and generation by transformers"}
        roles = {server: self.server, policies.get(self.generation, "policy"): self.policy, "idle": self.idle}
        numbers = iter(range(sum(roles.values())))
        return [{"role": role, "gpus": list(islice(numbers, count))} for role, count in roles.items() if count]


def assign_gpus(
    settings: RunSettings, gpus: int, sizes: Callable[[], tuple[int, list[int]]], divides: Callable[[int], bool]
) -> Layout:
    """Return the layout that the recipe asks for.

    ``sizes()``: how many GPUs hold the model in vLLM, and the possible tensor parallel sizes. ``divides(n)`` is True if
    the batch divides evenly by n processes. A server gets the GPUs that it needs. The policy gets as many of the others
    as the batch divides by. The remaining GPUs go to the server, as data parallel ranks.

    >>> lora = RunSettings({"use_vllm": True, "vllm_mode": "server", "use_peft": True, "vllm_tensor_parallel_size": 2})
    >>> assign_gpus(lora, 8, lambda: (2, [2]), lambda n: n < 5)[:4]
    ('server', 4, 4, 2)

    One of seven GPUs stays idle, because a server takes pairs and the batch divides by 2 and 4. Without an adapter, a
    server is one engine:

    >>> seven = assign_gpus(lora, 7, lambda: (2, [2]), lambda n: n in (2, 4))
    >>> seven[:4], seven.idle, seven.why.partition(";")[0]
    (('server', 4, 2, 2), 1, "2 GPUs together hold the server's weights and a sequence")
    >>> assign_gpus(lora.changed(use_peft=False), 9, lambda: (2, [2, 4]), lambda n: n < 7)[:5]
    ('server', 5, 4, 4, 'TRL sends all weights to one engine, which uses every GPU of the server')
    >>> assign_gpus(lora, 3, lambda: (2, [2]), lambda n: True)[:4]
    ('server', 1, 2, 2)
    >>> assign_gpus(lora, 2, lambda: (2, [2]), lambda n: True)
    Traceback (most recent call last):
    grpo_math.errors.ConfigError: vllm_mode='server' needs 2 separate GPUs, and 2 are visible: \
set vllm_mode to colocate, with vllm_enable_sleep_mode, or leave out use_vllm
    >>> assign_gpus(lora.changed(vllm_mode="colocate", vllm_enable_sleep_mode=True), 4, None, None)[:4]
    ('colocate', 4, 0, 2)
    >>> assign_gpus(lora.changed(vllm_server_host="node1"), 4, None, None)
    Layout(generation='server', policy=4, server=0, tensor_parallel=1, why='the server is at node1: every GPU trains', \
idle=0)
    """
    tp = settings.vllm_tensor_parallel_size
    if not settings.use_vllm:
        return Layout("transformers", gpus, 0, 1, "use_vllm is false: every GPU trains, and generates its own share")
    if settings.vllm_mode == "colocate":
        # TRL makes one vLLM engine of each group of this many processes, and refuses a remainder.
        if gpus % tp:
            raise ConfigError("vllm_tensor_parallel_size", tp, f"does not divide {gpus} GPUs", "use 1")
        sleeps = "sleeps during updates" if settings.vllm_enable_sleep_mode else "keeps its share during updates"
        return Layout("colocate", gpus, 0, tp, f"vllm_mode is colocate: vLLM shares each GPU, and {sleeps}")
    if url := settings.external_server:
        return Layout("server", gpus, 0, 1, f"the server is at {url}: every GPU trains")
    need, possible = sizes() if gpus > 1 else (1, [1])
    if gpus <= need:
        reason = f"needs {need} separate GPU{'s' * (need > 1)}, and {gpus} {'is' if gpus == 1 else 'are'} visible"
        remedy = "set vllm_mode to colocate, with vllm_enable_sleep_mode, or leave out use_vllm"
        raise ConfigError("vllm_mode", "server", reason, remedy)
    splits = [(policy, *server_ranks(settings, gpus - policy, need, possible)) for policy in range(gpus - need, 0, -1)]
    even = [split for split in splits if divides(split[0])]
    # Few idle GPUs, then many for the policy. If the batch divides by no number, settings/batch.py raises.
    policy, server, tp = min(even or splits[:1], key=lambda split: (gpus - split[0] - split[1], -split[0]))
    holders = "one GPU holds" if need == 1 else f"{need} GPUs together hold"
    why = f"{holders} the server's weights and a sequence"
    if tp > need:
        why = "TRL sends all weights to one engine, which uses every GPU of the server"
    if idle := gpus - policy - server:
        why += f"; {idle} stay idle, because neither the server's heads nor the batch divide by more"
    return Layout("server", policy, server, tp, why, idle)


def server_ranks(settings: RunSettings, gpus: int, need: int, sizes: list[int]) -> tuple[int, int]:
    """Return (GPUs of ``gpus`` that a server can use, tensor parallel size); ``need`` GPUs hold the model.

    An adapter can be sent to data parallel copies. TRL's weight transfer does not support data parallel copies of a
    dense model (its vllm_serve.py), so the server uses as much tensor parallelism as possible.
    """
    if settings.sends_adapter:
        return gpus // need * need, need
    most = max(tp for tp in sizes if tp <= gpus)
    return most, most


def tensor_parallel(machine: Machine, settings: RunSettings, most: int) -> tuple[int, list[int]]:
    """Return the fewest GPUs that hold the weights and a sequence, and all possible tensor parallel sizes.

    A size is a power of two that divides the heads, at most ``most``, and at least the recipe's
    ``vllm_tensor_parallel_size``.

    Twelve heads do not divide by 8. Two GPUs of 16 GB hold 10^10 parameters in 16 bit, and a sequence of 1,000
    tokens, though not one of the 10^6 that the model can have:

    >>> from types import SimpleNamespace
    >>> shape = SimpleNamespace(heads=12, total=10**10, matrices=0, cache=(0, 10**5), max_tokens=10**6)
    >>> settings = RunSettings({"max_completion_length": 500})
    >>> tensor_parallel(SimpleNamespace(shape=shape, gpu_bytes=16 * 2**30, prompt=500), settings, most=8)
    (2, [1, 2, 4])
    """
    requested, shape, prompt = settings.vllm_tensor_parallel_size, machine.shape, machine.prompt
    # vLLM refuses a size that does not divide the attention heads.
    sizes = [tp for tp in (1, 2, 4, 8) if shape.heads % tp == 0 and requested <= tp <= most]
    if requested not in sizes:
        reason = f"does not suit {shape.heads} heads and {most} GPU{'s' * (most > 1)} for the server"
        raise ConfigError("vllm_tensor_parallel_size", requested, reason, "leave it out")
    server_bytes = weights(shape, settings, 2) + sequence_bytes(shape, server_settings(settings, prompt), prompt)
    fits = (tp for tp in sizes if server_bytes / tp + VLLM_OVERHEAD <= VLLM_SERVER_SHARE * machine.gpu_bytes)
    return next(fits, sizes[-1]), sizes
