"""`grpo-math train`: start, watch and end the processes of a recipe on this machine.

The planner assigns the GPUs and chooses an accelerate config that fits. If the layout has a vLLM server, the server
starts first, on its GPUs, and stops last. Server and training have a supervisor each (system/supervisor.py), so that no
process outlives this one. Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP go only to the training processes, which finish their
step and save. Then the server ends. A run without a server and without an accelerate config trains in this process.

All processes run on this machine: for several, launch/slurm/ has scripts.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from grpo_math.checks.check_services import cache_only
from grpo_math.checks.preflight import EARLY, START, training_checks, warning_lines
from grpo_math.checks.setup import Setup
from grpo_math.errors import UserError
from grpo_math.generation.vllm_process import ServerProcess
from grpo_math.generation.vllm_server import make_key
from grpo_math.planner.devices import Layout
from grpo_math.settings import shipped
from grpo_math.settings.fields import most_used
from grpo_math.settings.recipe import read_and_set_env
from grpo_math.settings.run_settings import RunSettings
from grpo_math.system.gpus import Gpu
from grpo_math.system.machine import free_port, physical_cores
from grpo_math.system.signals import (
    EX_TEMPFAIL,
    INTERRUPTED,
    STOPPING,
    end_at_once,
    ended_by_signals,
    handling,
    leave_lost_terminal,
)
from grpo_math.system.streams import say
from grpo_math.system.supervisor import SupervisedCommand, send
from grpo_math.train.layout import INHERITED, Config, assigned_gpus, choose_layout, environment, refuse_used
from grpo_math.train.serve import choose_port, group_port, server_start

TRAINING = "grpo_math.train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--gpus", type=int, metavar="N", help="use the first N GPUs (default: all visible ones)")
    add("--accelerate_config", metavar="FILE", help="a file, or a name in accelerate_configs/")
    add("--method", metavar="NAME", help=argparse.SUPPRESS)  # shown as an example
    add("--list", action="store_true", help="list the shipped recipes and accelerate configs")
    add("--copy", metavar="NAME", help="copy one of them into the current folder")
    add("--json", action="store_true", help="with --measure: print one JSON object on stdout")
    add("--help_all", action="store_true", help=argparse.SUPPRESS)
    parser.epilog = f"{most_used()}\n\n{parser.epilog}"


def run(args: argparse.Namespace) -> int:
    """Train a recipe, and return the exit code of training."""
    if args.copy is not None:
        print(f"copied   {shipped.copy(args.copy)}")
        return 0
    if args.help_all:
        from grpo_math.train.program import main

        return main(["--help"])
    fields = [*args.fields, *(["--method", args.method] if args.method else [])]
    if args.list or not (fields or args.gpus or args.accelerate_config):
        print(shipped.listing())
        return 0
    return train(fields, args.gpus, args.accelerate_config, args.json)


def train(
    fields: list[str], count: int | None = None, accelerate_config: str | None = None, as_json: bool = False
) -> int:
    """Train a recipe on the first ``count`` GPUs, or all, and return the exit code of training."""
    parsed = read_and_set_env(fields)
    settings = parsed.raise_first_problem().settings
    if as_json and not settings.measure:
        raise UserError("--json would be ignored without --measure: leave it out")
    # The Hub's client would try each name six times, in the plan and in the checks.
    if note := cache_only([settings.dataset, settings.eval_dataset], settings.model_name_or_path):
        say("hub", note)
    gpus = assigned_gpus(settings, count)
    layout, config = choose_layout(settings, gpus, accelerate_config)
    used = gpus[: layout.server + layout.policy]
    refuse_used(used)
    with handling(STOPPING, end_at_once):
        # Refuse before a server is started, which takes minutes, and before torch is imported.
        setup = Setup(parsed, accelerate=config.content if config else {})
        warned = warning_lines(setup, training_checks(START, EARLY))
        if config is not None or settings.starts_server:
            return _launch(settings, fields, layout, config, used, {"warned": warned, "as_json": as_json})
        # CUDA and OpenMP will see these variables.
        os.environ.update(environment(used))
        from grpo_math.train.program import main

        return main(fields, parsed, warned, as_json)


def _launch(
    settings: RunSettings,
    fields: Sequence[str],
    layout: Layout,
    config: Config | None,
    used: Sequence[Gpu],
    handed_on: Mapping[str, Any],
) -> int:
    """Start the server, if the recipe has one, and training; end both; return the exit code of training.

    ``handed_on``: arguments of program.py's `main`.
    """
    # The stack stops training first. The server is needed until training has ended.
    with ended_by_signals(EX_TEMPFAIL), contextlib.ExitStack() as stack:
        server = None
        if settings.starts_server:
            # Server and training inherit the key from this process.
            make_key()
            port = choose_port(settings.requested("vllm_server_port"), 0)
            folder = settings.output_dir or "trainer_output"
            if settings.keeps_nothing:
                folder = stack.enter_context(TemporaryDirectory())
            log = Path(folder) / "vllm_server.log"
            server = ServerProcess(*server_start(settings, layout, used[: layout.server], port), log)
            stack.callback(server.stop)
            server.wait(settings.vllm_server_timeout)
            fields = [*fields, "--vllm_server_base_url", server.url, *group_port(settings)]
        variables = {**environment(used[layout.server :]), INHERITED: json.dumps(handed_on)}
        if not used:  # torch's launcher would give each process one thread
            variables.setdefault("OMP_NUM_THREADS", str(max(1, physical_cores() // layout.policy)))
        training = SupervisedCommand(_training(fields, config, layout.policy), environment=variables)
        stack.callback(training.stop)
        code = _watch(training, server, may_restart=settings.sends_adapter)
        # A killed process prints nothing. For several processes ranks.py reports the end.
        if config is None and code == 128 + signal.SIGKILL:
            print("error: training was ended by SIGKILL: the same command starts it again", file=sys.stderr)
        return code


def _training(argv: Sequence[str], config: Config | None, processes: int) -> list[str]:
    if config is None:
        return [sys.executable, "-m", TRAINING, *argv]
    launch = [sys.executable, "-m", "grpo_math.train.ranks", "--config_file", str(config.path)]
    launch += ["--num_processes", str(processes)]
    # accelerate's default is port 29500, and accelerate warns if another run on this machine has the port.
    if not config.content.get("main_process_port"):
        launch += ["--main_process_port", str(free_port())]
    return [*launch, "-m", TRAINING, *argv]


def _watch(training: SupervisedCommand, server: ServerProcess | None, may_restart: bool) -> int:
    """Return the exit code of training. Signals are passed on to it; a second Ctrl-C also raises KeyboardInterrupt."""
    requested = 0

    def ask(number: int, frame: Any) -> None:
        nonlocal requested
        leave_lost_terminal()
        # Training has not started yet, or has ended: there is nothing to finish.
        if not send(TRAINING, number):
            training.end()
        if number == signal.SIGINT and requested == INTERRUPTED:
            raise KeyboardInterrupt
        requested = max(requested, INTERRUPTED if number == signal.SIGINT else EX_TEMPFAIL)

    with handling((signal.SIGINT, *STOPPING), ask):
        while training.running:
            if server is not None and not server.running:
                line = server.ended()
                if not may_restart:  # a new server would serve the first weights
                    raise UserError(line)
                # Restart the server as often as it ends: training gives up after vllm_server_timeout without an answer.
                server.restart()
                say("server", f"{line.partition(':')[0]}; started again")
            time.sleep(0.2)
        code = training.wait()
        # Training that was ended before it handled the signal has another code.
        return requested if requested and code else code
