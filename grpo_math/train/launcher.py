"""`grpo-math train` and `grpo-math serve`: a recipe -> who runs where on this machine, started, watched and ended.

The planner lays the GPUs out and says which accelerate config fits. Where the layout has a vLLM server, it is started
on its GPUs first and stopped last. Server and training run under a keeper each (run/keeper.py), so that nothing
outlives this process. Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP go to the training processes alone, which finish their step
and save; the server ends when they have. One process without a server, and all that runs on a CPU without one, trains
in this process.

Does not span several machines: launch/slurm/ does. Does not check what two settings mean together: the training program
does.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from grpo_math import planner
from grpo_math.errors import ConfigError, UserError
from grpo_math.generation.server import key, make_key
from grpo_math.generation.vllm_process import STARTUP, ServerProcess
from grpo_math.planner import devices
from grpo_math.planner.devices import Gpu, Layout
from grpo_math.planner.settings import DEFAULTS, NotPlanned
from grpo_math.run.checkpoints import FINISHED
from grpo_math.run.keeper import Kept
from grpo_math.run.machine import free_port
from grpo_math.run.redact import is_address
from grpo_math.run.signals import AGAIN, HANGUP, INTERRUPTED, STOPPING, leave_lost_terminal
from grpo_math.run.streams import say
from grpo_math.settings import shipped
from grpo_math.settings.groups import screen
from grpo_math.settings.recipe import Recipe, read
from grpo_math.train import vllm_env
from grpo_math.train.layout import Config, arrange, environment, gpus_of, refuse_used, roles, starts_server
from grpo_math.train.server import PORT, RESTARTS, free_or_refused, group_port, port_of, start_of

TRAINING = "grpo_math.train"
UNFINISHED = "error: training ended with exit code 0 before it was finished: look for os._exit in what it calls"
HELP = """\
grpo-math train --config RECIPE.yaml [--FIELD VALUE ...]

  --gpus N                   use the first N GPUs (default: all; CUDA_VISIBLE_DEVICES is respected)
  --accelerate_config FILE   a file, or the name of one in accelerate_configs/ (default: what the plan says)
  --list                     list the recipes and accelerate configs that are shipped
  --copy NAME                copy one of them into the current folder

GRPO_MATH_VLLM names the `vllm` that serves (default: the one in PATH). Every other setting is a field of a recipe, here
with its default; --help-all shows all of them, TRL's too, with what they mean.
"""
SERVE_HELP = """\
grpo-math serve --config RECIPE.yaml [--FIELD VALUE ...] [-- OPTION OF vllm serve ...]

  --gpus N      use the first N GPUs (default: all; CUDA_VISIBLE_DEVICES is respected)
  --host HOST   who may reach it (default: 127.0.0.1; any other needs VLLM_API_KEY)
  --port PORT   default: vllm_server_port, 8000, or any that is free
  --check       start nothing: print what a run of the recipe sends to its server, adapter, weights or none
  --json        with --check: as one JSON object on stdout
  --make_env [DIR]   start nothing: make the environment for vLLM (default: .venv-vllm), and print the path of its vllm

GRPO_MATH_VLLM names the `vllm` that serves (default: the one in PATH).
"""


def train(argv: Sequence[str], in_process: Callable[[list[str], Recipe | None], int]) -> int:
    """Train as the recipe says, and return the exit code of training; ``in_process`` trains in this process, from the
    recipe as it was read here."""
    options, fields = _options(argv, "--gpus", "--accelerate_config", "--list", "--copy")
    if options.copy is not None:
        print(f"copied   {shipped.copy(options.copy)}")
        return 0
    if options.list or not argv:
        print(shipped.listing())
        return 0
    if {"-h", "--help"} & set(fields):
        print(f"{HELP}\n{screen()}")
        return 0
    if "--help_all" in fields:
        print(HELP)
        return in_process(["--help"], None)
    in_process = _no_silent_exit()(in_process)
    parsed = read(fields)
    recipe = parsed.sound().stated()
    gpus = gpus_of(recipe, options.gpus)
    serves = starts_server(recipe)
    if not (gpus or serves or options.accelerate_config is not None):
        return in_process(fields, parsed)
    layout, config = arrange(recipe, gpus, options.accelerate_config, serves)
    used = gpus[: layout.server + layout.policy]
    refuse_used(used)
    if gpus:
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # nvidia-smi's numbers
    if config is None and not serves:
        os.environ.update(environment(used))
        return in_process(fields, parsed)
    run_dir = Path(str(recipe.get("output_dir") or "trainer_output"))
    with _ended_by_signals(dict.fromkeys(STOPPING, AGAIN)), contextlib.ExitStack() as stack:
        server = None
        if serves:
            make_key()
            log = run_dir / "vllm_server.log"
            server = ServerProcess(start_of(recipe, layout, used[: layout.server], port_of(recipe, 0)), log)
            stack.callback(server.stop)
            server.wait(float(recipe.get("vllm_server_timeout") or STARTUP))
            fields = [*fields, "--vllm_server_base_url", server.url, *group_port(recipe)]
        command = _training(fields, config, layout.policy)
        training = Kept(command, environment=environment(used[layout.server :]), module=TRAINING)
        stack.callback(training.stop)
        code = _watch(training, server, may_restart=devices.sends_adapter({**DEFAULTS, **recipe}))
        if config is None and code == 128 + signal.SIGKILL:  # ranks.py says it of several
            print("error: training was ended by SIGKILL: the same command starts it again", file=sys.stderr)
        if code == 0 and not (run_dir / FINISHED).exists():
            print(UNFINISHED, file=sys.stderr)
            return 1
        return code


@contextlib.contextmanager
def _no_silent_exit() -> Iterator[None]:
    """Training in this process: a reward that calls ``os._exit(0)`` ends it with exit code 1 and a line."""
    leave, pid = os._exit, os.getpid()

    def leave_aloud(status: int) -> NoReturn:
        if status == 0 and os.getpid() == pid:  # a forked process may end like this
            print(UNFINISHED, file=sys.stderr, flush=True)
            status = 1
        leave(status)

    os._exit = leave_aloud
    try:
        yield
    finally:
        os._exit = leave


def serve(argv: Sequence[str]) -> int:
    """The recipe's vLLM server alone, on this machine's GPUs, until Ctrl-C; what follows ``--`` goes to vLLM."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    more = words[end + 1 :]
    options, fields = _options(words[:end], "--gpus", "--host", "--port", "--check", "--json", "--make_env")
    if options.make_env is not None:
        print(vllm_env.make(options.make_env))
        return 0
    if {"-h", "--help"} & set(fields):
        print(SERVE_HELP, end="")
        return 0
    recipe = read(fields).sound().stated()
    if options.check:
        sent = "adapter" if devices.sends_adapter({**DEFAULTS, **recipe}) else "weights"
        answer = sent if starts_server(recipe) else "none"
        print(json.dumps({"server": answer}) if options.json else answer)
        return 0
    if options.json:
        raise UserError("--json would be ignored without --check: leave it out")
    if not recipe.get("use_vllm") or recipe.get("vllm_mode", DEFAULTS["vllm_mode"]) != "server":
        raise UserError("this recipe has no server to start: set use_vllm: true and vllm_mode: server, or use train")
    if options.port is not None and not 1 <= options.port <= 65535:
        raise ConfigError("port", options.port, "is out of range", "give a number from 1 to 65535")
    if options.host is not None and not is_address(f"http://{options.host}"):
        raise ConfigError("host", options.host, "is not a host", "give a name or an IP address")
    gpus = gpus_of(recipe, options.gpus)
    refuse_used(gpus)
    layout = _of_server(recipe, gpus)
    port = free_or_refused("port", options.port) if options.port else port_of(recipe, PORT)
    start = start_of(recipe, layout, gpus[: layout.server], port, options.host or "127.0.0.1", more)
    if not key():
        say("warning:", "every user of this machine can use this server and change its weights: set VLLM_API_KEY")
    with _ended_by_signals({signal.SIGTERM: 143, **dict.fromkeys(HANGUP, 129)}), contextlib.ExitStack() as stack:
        server = ServerProcess(start, None)
        stack.callback(server.stop)
        try:
            server.wait(STARTUP)
            server.kept.wait()
            raise UserError(server.ended())
        except KeyboardInterrupt:
            return 0


def _of_server(recipe: Mapping[str, Any], gpus: Sequence[Gpu]) -> Layout:
    tp = recipe.get("vllm_tensor_parallel_size", 1)
    layout = Layout("server", 0, tp if gpus else 0, tp, "")
    if gpus:
        with contextlib.suppress(NotPlanned):
            layout = planner.serve_layout(recipe, gpus=len(gpus), gpu_gb=min(gpu.gb for gpu in gpus))
        print(roles(layout, gpus), file=sys.stderr)
    return layout


# What the recipe and the command line say


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UserError(f"{message}: see --help")


KINDS: dict[str, dict[str, Any]] = {
    **{name: {"type": int} for name in ("--gpus", "--port")},
    **{name: {"action": "store_true"} for name in ("--check", "--json", "--list")},
    "--make_env": {"nargs": "?", "const": ".venv-vllm"},
}


def _options(argv: Sequence[str], *names: str) -> tuple[argparse.Namespace, list[str]]:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(name, **KINDS.get(name, {}))
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


def _watch(training: Kept, server: ServerProcess | None, may_restart: bool) -> int:
    """Until training ends. Signals are passed on to it; a second Ctrl-C also raises KeyboardInterrupt."""
    asked = 0

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        leave_lost_terminal()
        training.send(number)
        if number == signal.SIGINT and asked == INTERRUPTED:
            raise KeyboardInterrupt
        asked = max(asked, INTERRUPTED if number == signal.SIGINT else AGAIN)

    with _handling(dict.fromkeys((signal.SIGINT, *STOPPING), ask)):
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
                say("server", f"{line}; training waits for it, and then ends with a checkpoint")
                server = None
            else:
                server.restart()
                say("server", f"{line.partition(':')[0]}; started again ({server.restarts} of {RESTARTS})")


@contextlib.contextmanager
def _handling(handlers: Mapping[signal.Signals, Callable[[int, Any], None]]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _ended_by_signals(codes: Mapping[signal.Signals, int]) -> Iterator[None]:
    """These signals leave through the same doors as any error, so that what was started is stopped; with exit codes."""

    def leave(number: int, frame: Any) -> None:
        leave_lost_terminal()
        for each in codes:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(codes[signal.Signals(number)])

    with _handling(dict.fromkeys(codes, leave)):
        yield
