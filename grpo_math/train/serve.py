"""The vLLM server of a recipe: its command and its ports; and `grpo-math serve`, which runs it alone until Ctrl-C.

generation/sync.py syncs the weights to the server.
"""

import argparse
import contextlib
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_math import planner
from grpo_math.errors import ConfigError, UserError
from grpo_math.generation import vllm_server
from grpo_math.generation.models import model_path
from grpo_math.generation.vllm_process import STARTUP, ServerProcess, executable
from grpo_math.planner.devices import Layout, server_ranks
from grpo_math.planner.settings import NotPlanned
from grpo_math.settings.fields import defaults
from grpo_math.settings.recipe import read_and_set_env
from grpo_math.settings.vllm import generates, sends_adapter, starts_server
from grpo_math.system.addresses import url_of
from grpo_math.system.gpus import Gpu
from grpo_math.system.machine import free_port, port_is_free
from grpo_math.system.signals import ended_by_signals
from grpo_math.system.streams import Answer, say
from grpo_math.train import vllm_env
from grpo_math.train.layout import environment, gpus_of, refuse_used, roles

PORT = 8000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpus", type=int, metavar="N", help="use the first N GPUs (default: all visible ones)")
    add("--host", help="the address to listen on (default: 127.0.0.1; others need VLLM_API_KEY)")
    add("--port", type=int, help="the port (default: vllm_server_port, else 8000 or a free one)")
    add("--teacher", action="store_true", help="serve the model for reference_model: its weights never change")
    add("--check", action="store_true", help="start nothing; print what a run sends: adapter, weights or none")
    add(
        "--make_env",
        nargs="?",
        const=".venv-vllm",
        metavar="DIR",
        help="start nothing; make the environment for vLLM (default: .venv-vllm), and print the path of its vllm",
    )
    parser.epilog = f"GRPO_MATH_VLLM names the vllm that serves (default: the one in PATH).\n\n{parser.epilog}"


def run(args: argparse.Namespace) -> Answer | int:
    """Serve until Ctrl-C. The words after ``--`` on the command line go to vLLM."""
    if args.make_env is not None:
        print(vllm_env.make(args.make_env))
        return 0
    recipe = read_and_set_env(args.fields).raise_first_problem().explicit_values()
    if args.teacher:
        recipe |= {"use_vllm": True, "vllm_mode": "server", "use_peft": False}
    if args.check:
        sent = "adapter" if sends_adapter(recipe) else "weights"
        answer = sent if starts_server(recipe) else "none"
        return Answer({"server": answer}, answer)
    if args.json:
        raise UserError("--json would be ignored without --check: leave it out")
    if generates(recipe) != "server":
        raise UserError("this recipe has no server to start: set use_vllm: true and vllm_mode: server, or use train")
    gpus = gpus_of(recipe, args.gpus)
    refuse_used(gpus)
    layout = _layout(recipe, gpus)
    port = choose_port({**recipe, "vllm_server_port": args.port or recipe.get("vllm_server_port")}, PORT)
    more = (args.host or "127.0.0.1", args.after_dashes, args.teacher)
    start = server_start(recipe, layout, gpus[: layout.server], port, *more)
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


def _layout(recipe: Mapping[str, Any], gpus: Sequence[Gpu]) -> Layout:
    """Return the layout of a server that has all GPUs. If the model cannot be planned, the recipe gives the size of an
    engine: by default each GPU has one if adapters are sent, else all GPUs have one together."""
    tp = recipe.get("vllm_tensor_parallel_size", 1 if sends_adapter(recipe) else max(1, len(gpus)))
    server, tp = server_ranks(recipe, max(tp, len(gpus)), tp, [tp])
    layout = Layout("server", 0, server, tp, "")
    if gpus:
        with contextlib.suppress(NotPlanned):
            layout = planner.serve_layout(recipe, gpus=len(gpus), gpu_gb=min(gpu.gb for gpu in gpus))
        print(roles(layout, gpus), file=sys.stderr)
    return layout


def server_start(
    recipe: Mapping[str, Any],
    layout: Layout,
    gpus: Sequence[Gpu],
    port: int,
    host: str = "127.0.0.1",
    more: Sequence[str] = (),
    teacher: bool = False,
) -> tuple[list[str], dict[str, str], str]:
    """Return command, environment and address of a recipe's server on these GPUs, or on the CPU.

    ``more``: options of ``vllm serve``. The weights of a ``teacher`` never change.
    """
    settings = {**defaults(), **recipe}
    dtype = recipe.get("dtype") or "auto"
    extra = [] if settings["model_revision"] == "main" else ["--revision", settings["model_revision"]]
    if teacher:
        extra += ["--no-enable-prefix-caching"]  # see `Server.score`
    command = vllm_server.command(
        model_path(settings["model_name_or_path"]),
        port=port,
        host=host,
        # float32 is for the optimizer, and the plan counts 16 bits.
        dtype="auto" if gpus and dtype == "float32" else dtype,
        max_model_length=settings["vllm_max_model_length"],
        tensor_parallel=layout.tensor_parallel,
        data_parallel=max(1, layout.data_parallel),
        lora_rank=settings["lora_r"] if sends_adapter(recipe) else 0,
        # A batch that is sampled ahead uses an older adapter, so the server has both at work.
        adapters=1 + int(recipe.get("staleness") or 0),
        fixed=teacher,
        in_4bit=settings["load_in_4bit"],
        on_gpu=bool(gpus),
        seed=int(recipe.get("seed") or 0),
        extra=[*extra, *more],
        executable=executable(),
    )
    return command, {**environment(gpus), **vllm_server.environment()}, url_of(host, port)


def choose_port(recipe: Mapping[str, Any], preferred: int) -> int:
    """Return the recipe's port, which has to be free; otherwise ``preferred``, or any that is free.

    A server binds its port half a minute later, so two runs that prefer the same number would collide. Training gets
    the address as an argument and prefers none.
    """
    requested = recipe.get("vllm_server_port")
    if requested and not port_is_free(requested):
        remedy = "choose another, or leave it out for a free one"
        raise ConfigError("vllm_server_port", requested, "is in use by another program", remedy)
    return requested or (preferred if preferred and port_is_free(preferred) else free_port())


def group_port(recipe: Mapping[str, Any]) -> list[str]:
    """Return the option for the second port, of TRL's weight transfer, if its default 51216 is taken."""
    if recipe.get("vllm_group_port") or sends_adapter(recipe) or port_is_free(51216):
        return []
    return ["--vllm_group_port", str(free_port())]
