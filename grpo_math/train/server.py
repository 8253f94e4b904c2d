"""The vLLM server of a run: its command and its ports.

Does not start it (generation/vllm_process.py does), and does not sync weights to it (generation/sync.py does).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_math.errors import ConfigError
from grpo_math.generation import server
from grpo_math.generation.models import model_path
from grpo_math.generation.vllm_process import Start, executable
from grpo_math.planner import devices
from grpo_math.planner.devices import Gpu, Layout
from grpo_math.planner.settings import DEFAULTS
from grpo_math.run.machine import free_port, port_is_free
from grpo_math.train.layout import environment

PORT = 8000


def start_of(
    recipe: Mapping[str, Any],
    layout: Layout,
    gpus: Sequence[Gpu],
    port: int,
    host: str = "127.0.0.1",
    more: Sequence[str] = (),
) -> Start:
    """Return how to start a recipe's server on these GPUs, or on the CPU. ``more``: options of ``vllm serve``."""
    settings = {**DEFAULTS, **recipe}
    adapter = devices.sends_adapter(settings)
    dtype = recipe.get("dtype") or "auto"
    extra = [] if settings["model_revision"] == "main" else ["--revision", settings["model_revision"]]
    if settings["load_in_4bit"]:  # as the trainer loads the model
        extra += ["--quantization", "bitsandbytes"]
    if not gpus:
        extra += ["--enforce-eager"]
    elif not settings["vllm_max_model_length"]:
        extra += ["--max-model-len", "auto"]  # as much as fits next to the weights
    command = server.command(
        model_path(settings["model_name_or_path"]),
        port=port,
        host=host,
        # float32 is for the optimizer, and the plan counts 16 bits.
        dtype="auto" if gpus and dtype == "float32" else dtype,
        max_model_length=settings["vllm_max_model_length"],
        tensor_parallel=layout.tensor_parallel,
        data_parallel=max(1, layout.data_parallel),
        lora_rank=settings["lora_r"] if adapter else 0,
        # A batch that is sampled ahead uses an older adapter, so the server has both at work.
        adapters=1 + int(recipe.get("staleness") or 0),
        seed=int(recipe.get("seed") or 0),
        extra=[*extra, *more],
        executable=executable(),
    )
    # 0.0.0.0 means all interfaces, and is not an address to connect to.
    reached = "127.0.0.1" if host == "0.0.0.0" else host
    return Start(command, {**environment(gpus), **server.environment()}, f"http://{reached}:{port}")


def port_of(recipe: Mapping[str, Any], preferred: int) -> int:
    """Return the recipe's port, which has to be free; otherwise ``preferred``, or any that is free.

    A server binds its port half a minute later, so two runs that prefer the same number would collide. Training is told
    the address and prefers none.
    """
    if stated := recipe.get("vllm_server_port"):
        return free_or_refused("vllm_server_port", stated)
    return preferred if preferred and port_is_free(preferred) else free_port()


def free_or_refused(name: str, port: int) -> int:
    if not port_is_free(port):
        raise ConfigError(name, port, "is in use by another program", "choose another, or leave it out for a free one")
    return port


def group_port(recipe: Mapping[str, Any]) -> list[str]:
    """Return the option for the second port, of TRL's weight transfer, if its default 51216 is taken."""
    if recipe.get("vllm_group_port") or devices.sends_adapter({**DEFAULTS, **recipe}) or port_is_free(51216):
        return []
    return ["--vllm_group_port", str(free_port())]
