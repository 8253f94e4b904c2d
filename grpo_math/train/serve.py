"""The vLLM server of a recipe: its command, its ports, and a server that runs alone until Ctrl-C.

generation/sync.py syncs the weights to the server.
"""

import contextlib
import signal
import sys
from collections.abc import Sequence

from grpo_math import planner
from grpo_math.errors import ConfigError, UserError
from grpo_math.generation import vllm_env, vllm_server
from grpo_math.generation.models import model_path
from grpo_math.generation.vllm_process import STARTUP, ServerProcess, executable
from grpo_math.planner.devices import Layout, server_ranks
from grpo_math.planner.settings import NotPlanned
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.addresses import server_url
from grpo_math.system.gpus import Gpu
from grpo_math.system.machine import free_port, port_is_free
from grpo_math.system.signals import ended_by_signals
from grpo_math.system.streams import say
from grpo_math.train.layout import assigned_gpus, environment, refuse_used, roles

PORT = 8000


def serve(settings: RunSettings, number: int | None, port: int | None, host: str, more: Sequence[str]) -> int:
    """Run the server of a recipe on the first ``number`` GPUs until Ctrl-C. ``more``: options of ``vllm serve``."""
    gpus = assigned_gpus(settings, number)
    refuse_used(gpus)
    layout = _layout(settings, gpus)
    port = choose_port(port, PORT)
    start = server_start(settings, layout, gpus[: layout.server], port, host, more)
    if not vllm_server.key():
        say("warning:", "every user of this machine can use this server and change its weights: set VLLM_API_KEY")
    with ended_by_signals(128 + signal.SIGTERM), contextlib.ExitStack() as stack:
        process = ServerProcess(*start)
        stack.callback(process.stop)
        try:
            process.wait(STARTUP)
            process.supervised.wait()
            # A server that ends by itself has failed, with any exit code.
            raise UserError(process.ended())
        except KeyboardInterrupt:
            return 0


def _layout(settings: RunSettings, gpus: Sequence[Gpu]) -> Layout:
    """Return the layout of a server that has all GPUs. If the model cannot be planned, the recipe gives the size of an
    engine: by default each GPU has one if adapters are sent, else all GPUs have one together."""
    tp = settings.requested("vllm_tensor_parallel_size") or (1 if settings.sends_adapter else max(1, len(gpus)))
    server, tp = server_ranks(settings, max(tp, len(gpus)), tp, [tp])
    layout = Layout("server", 0, server, tp, "")
    if gpus:
        with contextlib.suppress(NotPlanned):
            layout, _ = planner.serve_layout(settings, gpus=len(gpus), gpu_gb=min(gpu.gb for gpu in gpus))
        print(roles(layout, gpus), file=sys.stderr)
    return layout


def server_start(
    settings: RunSettings,
    layout: Layout,
    gpus: Sequence[Gpu],
    port: int,
    host: str = "127.0.0.1",
    more: Sequence[str] = (),
) -> tuple[list[str], dict[str, str], str]:
    """Return command, environment and address of a recipe's server on these GPUs, or on the CPU.

    ``more``: options of ``vllm serve``.
    """
    # vLLM's own default is the format in which the weights are stored.
    dtype = settings.requested("dtype") or "auto"
    extra = [] if settings.model_revision == "main" else ["--revision", settings.model_revision]
    server = vllm_server.ServerSettings(
        model=model_path(settings.model_name_or_path),
        port=port,
        host=host,
        # float32 is for the optimizer, and the plan counts 16 bits.
        dtype="auto" if gpus and dtype == "float32" else dtype,
        max_model_length=settings.vllm_max_model_length,
        tensor_parallel=layout.tensor_parallel,
        data_parallel=max(1, layout.data_parallel),
        lora_rank=settings.lora_r if settings.sends_adapter else 0,
        # A batch that is sampled ahead uses an older adapter, so the server has both at work.
        adapters=1 + settings.staleness,
        in_4bit=settings.load_in_4bit,
        on_gpu=bool(gpus),
        seed=settings.requested("seed") or 0,
        extra=[*extra, *more],
        executable=executable(vllm_env.supported(settings)),
    )
    return server.command(), {**environment(gpus), **vllm_server.environment()}, server_url(host, port)


def choose_port(requested: int | None, preferred: int) -> int:
    """Return the requested port, which has to be free; otherwise ``preferred``, or any that is free.

    A server binds its port half a minute later, so two runs that prefer the same number would collide. Training gets
    the address as an argument and prefers none.
    """
    if requested and not port_is_free(requested):
        remedy = "choose another, or leave it out for a free one"
        raise ConfigError("vllm_server_port", requested, "is in use by another program", remedy)
    return requested or (preferred if preferred and port_is_free(preferred) else free_port())


def group_port(settings: RunSettings) -> list[str]:
    """Return the option for the second port, of TRL's weight transfer, if its default 51216 is taken."""
    if settings.requested("vllm_group_port") or settings.sends_adapter or port_is_free(51216):
        return []
    return ["--vllm_group_port", str(free_port())]
