"""`grpo-math train` and `grpo-math serve`: a recipe -> who runs where on this machine, started, watched and ended.

The planner lays the GPUs out and says which accelerate config fits. Where the layout has a vLLM server, it is started
on its GPUs first and stopped last. Server and training run under a keeper each (keeper.py), so that nothing outlives
this process. Ctrl-C, SIGTERM and SIGUSR1 go to the training processes alone, which finish their step and save; the
server ends when they have. One process without a server, and all that runs on a CPU without one, trains in this
process.

Does not span several machines: launch/slurm/ does. Does not check what two settings mean together: the training program
does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_math import planner
from grpo_math.errors import ConfigError, UserError
from grpo_math.planner import devices
from grpo_math.planner.devices import Layout
from grpo_math.planner.settings import DEFAULTS, NotPlanned
from grpo_math.run.ports import free_port
from grpo_math.run.redact import is_address
from grpo_math.run.signals import AGAIN, INTERRUPTED, STOPPING
from grpo_math.settings import accelerate
from grpo_math.settings.recipe import Recipe, read
from grpo_math.train.keeper import Kept
from grpo_math.train.layout import Config, _arrange, _gpus, _numbers, _refuse_used, _roles, _starts_server
from grpo_math.train.server import (
    PORT,
    RESTARTS,
    STARTUP,
    Supervised,
    _environment,
    _group_port,
    _own_port,
    _say,
    _server,
    port_of,
)

TRAINING = "grpo_math.train"
HELP = """\
grpo-math train --config RECIPE.yaml [--FIELD VALUE ...]

  --gpus N                   use the first N GPUs (default: all; CUDA_VISIBLE_DEVICES is respected)
  --accelerate_config FILE   a file, or the name of one in accelerate_configs/ (default: what the plan says)

GRPO_MATH_VLLM names the `vllm` that serves (default: the one in PATH). Every other setting is the training program's:
"""


def train(argv: Sequence[str], in_process: Callable[[list[str], Recipe | None], int]) -> int:
    """Train as the recipe says, and return the exit code of training; ``in_process`` trains in this process, from the
    recipe as it was read here."""
    accelerate.environment()
    options, rest = _options(argv, "--gpus", "--accelerate_config")
    if {"-h", "--help"} & set(rest):
        print(HELP)
        return in_process(rest, None)
    found = read(rest)
    recipe = found.sound().stated()
    gpus = _gpus(recipe, options.gpus)
    serves = _starts_server(recipe)
    if not (gpus or serves or options.accelerate_config is not None):
        return in_process(rest, found)
    layout, config = _arrange(recipe, gpus, options.accelerate_config, serves)
    used = gpus[: layout.server + layout.policy]
    _refuse_used(used)
    if gpus:
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # nvidia-smi's numbers
    if config is None and not serves:
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = _numbers(used)
        return in_process(rest, found)
    with _ended_by_signals({**dict.fromkeys(STOPPING, AGAIN), signal.SIGHUP: 129}), contextlib.ExitStack() as stack:
        server = None
        if serves:
            log = Path(str(recipe.get("output_dir") or "trainer_output")) / "vllm_server.log"
            start = _server(recipe, layout, _numbers(used[: layout.server]), port_of(recipe, 0))
            server = Supervised(start, log)
            stack.callback(server.stop)
            server.wait(float(recipe.get("vllm_server_timeout") or STARTUP))
            rest = [*rest, "--vllm_server_base_url", server.url, *_group_port(recipe)]
        command = _training(rest, config, layout.policy)
        training = Kept(command, environment=_environment(_numbers(used[layout.server :])), module=TRAINING)
        stack.callback(training.stop)
        code = _watch(training, server, may_restart=devices.sends_adapter({**DEFAULTS, **recipe}))
        if config is None and code == 128 + signal.SIGKILL:  # ranks.py says it of several
            print("error: training was ended by SIGKILL: the same command starts it again", file=sys.stderr)
        return code


def serve(argv: Sequence[str]) -> int:
    """The recipe's vLLM server alone, on this machine's GPUs, until Ctrl-C."""
    options, rest = _options(argv, "--gpus", "--host", "--port")
    recipe = read(rest).sound().stated()
    gpus = _gpus(recipe, options.gpus)
    _refuse_used(gpus)
    layout = Layout("server", 0, 0, 1, "")
    if gpus:
        try:
            layout = planner.serve_layout(recipe, gpus=len(gpus), gpu_gb=min(gpu.gb for gpu in gpus))
        except NotPlanned:
            tp = recipe.get("vllm_tensor_parallel_size", 1)
            layout = Layout("server", 0, tp, tp, "")
        print(_roles(layout, gpus), file=sys.stderr)
    if options.port is not None and not 1 <= options.port <= 65535:
        raise ConfigError("port", options.port, "is out of range", "give a number from 1 to 65535")
    if options.host is not None and not is_address(f"http://{options.host}"):
        raise ConfigError("host", options.host, "is no host", "give a name or an IP address")
    port = _own_port("port", options.port) if options.port else port_of(recipe, PORT)
    with _ended_by_signals({signal.SIGTERM: 143, signal.SIGHUP: 129}), contextlib.ExitStack() as stack:
        server = Supervised(
            _server(recipe, layout, _numbers(gpus[: layout.server]), port, options.host or "127.0.0.1"), None
        )
        stack.callback(server.stop)
        try:
            server.wait(STARTUP)
            server.kept.wait()
            raise UserError(server.ended())
        except KeyboardInterrupt:
            return 0


# What the recipe and the command line say


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UserError(f"{message}: see grpo-math train --help")


def _options(argv: Sequence[str], *names: str) -> tuple[argparse.Namespace, list[str]]:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(name, type=int if name in ("--gpus", "--port") else str)
    return parser.parse_known_args(list(argv))


# Training


def _training(argv: Sequence[str], config: Config | None, processes: int) -> list[str]:
    if config is None:
        return [sys.executable, "-m", TRAINING, *argv]
    launch = [sys.executable, "-m", "grpo_math.train.ranks", "--config_file", str(config.path)]
    launch += ["--num_processes", str(processes)]
    if not config.says.get("main_process_port"):
        launch += ["--main_process_port", str(free_port())]
    return [*launch, "-m", TRAINING, *argv]


def _watch(training: Kept, server: Supervised | None, may_restart: bool) -> int:
    """Until training ends. Signals are passed on to it; a second Ctrl-C also raises KeyboardInterrupt."""
    asked = 0

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        training.send(number)
        if number == signal.SIGINT and asked == INTERRUPTED:
            raise KeyboardInterrupt
        asked = max(asked, INTERRUPTED if number == signal.SIGINT else AGAIN)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, *STOPPING)}
    try:
        while True:
            try:
                code = training.wait(0.2)
                return asked if asked and code else code
            except subprocess.TimeoutExpired:
                pass
            if server is None or server.running:
                continue
            line = server.ended()
            if not may_restart:  # it would serve the weights of the start
                raise UserError(line)
            if server.restarts == RESTARTS:
                _say("server", f"{line}; training waits for it, and then ends with a checkpoint")
                server = None
            else:
                server.restart()
                _say("server", f"{line.partition(':')[0]}; started again ({server.restarts} of {RESTARTS})")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Ended(SystemExit):
    """A signal has come that ends this process."""


@contextlib.contextmanager
def _ended_by_signals(codes: Mapping[signal.Signals, int]) -> Iterator[None]:
    """These signals leave through the same doors as any error, so that what was started is stopped; with exit codes."""

    def leave(number: int, frame: Any) -> None:
        for each in caught:
            signal.signal(each, signal.SIG_IGN)
        raise _Ended(codes[signal.Signals(number)])

    caught = [number for number in codes if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in caught}  # nohup stays nohup
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
