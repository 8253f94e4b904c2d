"""`grpo-math serve`: the vLLM server of a recipe alone, on this machine's GPUs, until Ctrl-C.

Does not train (launcher.py does), and does not sync weights to the server (generation/sync.py does).
"""

import argparse
import contextlib
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_math import planner
from grpo_math.errors import UserError
from grpo_math.generation.server import key
from grpo_math.generation.vllm_process import STARTUP, ServerProcess
from grpo_math.planner import devices
from grpo_math.planner.devices import Gpu, Layout
from grpo_math.planner.settings import DEFAULTS, NotPlanned
from grpo_math.run.signals import ended_by_signals
from grpo_math.run.streams import Answer, say
from grpo_math.settings.recipe import read
from grpo_math.train import vllm_env
from grpo_math.train.layout import gpus_of, refuse_used, roles, starts_server
from grpo_math.train.server import PORT, free_or_refused, port_of, start_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpus", type=int, metavar="N", help="use the first N GPUs (default: all visible ones)")
    add("--host", help="the address to listen on (default: 127.0.0.1; others need VLLM_API_KEY)")
    add("--port", type=int, help="(default: vllm_server_port, 8000, or any that is free)")
    add("--check", action="store_true", help="start nothing; print what a run sends: adapter, weights or none")
    make_env = "start nothing; make the environment for vLLM (default: .venv-vllm), and print the path of its vllm"
    add("--make_env", nargs="?", const=".venv-vllm", metavar="DIR", help=make_env)
    parser.epilog = f"GRPO_MATH_VLLM names the vllm that serves (default: the one in PATH).\n\n{parser.epilog}"


def run(args: argparse.Namespace) -> Answer | int:
    """Serve until Ctrl-C. The words after ``--`` on the command line go to vLLM."""
    if args.make_env is not None:
        print(vllm_env.make(args.make_env))
        return 0
    recipe = read(args.fields).sound().stated()
    if args.check:
        sent = "adapter" if devices.sends_adapter({**DEFAULTS, **recipe}) else "weights"
        answer = sent if starts_server(recipe) else "none"
        return Answer({"server": answer}, answer)
    if args.json:
        raise UserError("--json would be ignored without --check: leave it out")
    if not recipe.get("use_vllm") or recipe.get("vllm_mode", DEFAULTS["vllm_mode"]) != "server":
        raise UserError("this recipe has no server to start: set use_vllm: true and vllm_mode: server, or use train")
    gpus = gpus_of(recipe, args.gpus)
    refuse_used(gpus)
    layout = _layout(recipe, gpus)
    port = free_or_refused("port", args.port) if args.port else port_of(recipe, PORT)
    start = start_of(recipe, layout, gpus[: layout.server], port, args.host or "127.0.0.1", args.after_dashes)
    if not key():
        say("warning:", "every user of this machine can use this server and change its weights: set VLLM_API_KEY")
    with ended_by_signals(128 + signal.SIGTERM), contextlib.ExitStack() as stack:
        server = ServerProcess(start, None)
        stack.callback(server.stop)
        try:
            server.wait(STARTUP)
            server.kept.wait()
            # A server that ends by itself has failed, with any exit code.
            raise UserError(server.ended())
        except KeyboardInterrupt:
            return 0


def _layout(recipe: Mapping[str, Any], gpus: Sequence[Gpu]) -> Layout:
    """Return the layout of a server that has all GPUs."""
    tp = recipe.get("vllm_tensor_parallel_size", 1)
    layout = Layout("server", 0, tp if gpus else 0, tp, "")
    if gpus:
        with contextlib.suppress(NotPlanned):
            layout = planner.serve_layout(recipe, gpus=len(gpus), gpu_gb=min(gpu.gb for gpu in gpus))
        print(roles(layout, gpus), file=sys.stderr)
    return layout
