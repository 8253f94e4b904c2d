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
import shutil
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math import batch, planner, vllm_server
from grpo_math.checks import launching
from grpo_math.checks.services import is_free
from grpo_math.errors import ConfigError, UserError
from grpo_math.keeper import Kept
from grpo_math.planner import devices
from grpo_math.planner.devices import Gpu, Layout
from grpo_math.planner.settings import DEFAULTS, NotPlanned
from grpo_math.recipe import read
from grpo_math.redact import is_address
from grpo_math.shipped import find
from grpo_math.signals import AGAIN, INTERRUPTED, STOPPING

TRAINING = "grpo_math.train"
ZERO = ("zero2", "zero2_offload", "zero3", "zero3_offload")  # tried in this order where plain data parallelism is short
NEEDS_WHOLE = ("eval_n", "heldout_every", "difficulty_band", "curriculum")  # train.py refuses them under ZeRO-3
PORT = 8000
STARTUP = 1800.0  # seconds for a server to load its model, where vllm_server_timeout does not say
RESTARTS = 3
LOG_LINES = 15
HELP = """\
grpo-math train --config RECIPE.yaml [--FIELD VALUE ...]

  --gpus N                   use the first N GPUs (default: all; CUDA_VISIBLE_DEVICES is respected)
  --accelerate_config FILE   a file, or the name of one in accelerate_configs/ (default: what the plan says)

GRPO_MATH_VLLM names the `vllm` that serves (default: the one in PATH). Every other setting is the training program's:
"""


def train(argv: Sequence[str], in_process: Callable[[list[str]], int]) -> int:
    """Train as the recipe says, and return the exit code of training; ``in_process`` trains in this process."""
    launching.environment()
    options, rest = _options(argv, "--gpus", "--accelerate_config")
    if {"-h", "--help"} & set(rest):
        print(HELP)
        return in_process(rest)
    recipe = _recipe(rest)
    gpus = _gpus(recipe, options.gpus)
    serves = _starts_server(recipe)
    if not (gpus or serves or options.accelerate_config is not None):
        return in_process(rest)
    layout, config = _arrange(recipe, gpus, options.accelerate_config, serves)
    used = gpus[: layout.server + layout.policy]
    _refuse_used(used)
    if gpus:
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # nvidia-smi's numbers
    if config is None and not serves:
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = _numbers(used)
        return in_process(rest)
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
    recipe = _recipe(rest)
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


def _recipe(argv: Sequence[str]) -> dict[str, Any]:
    """The fields that the recipe and the command line state; a `UserError` for one that cannot be."""
    found = read(argv)
    if found.problems:
        raise found.problems[0]
    return {name: found.values[name] for name in found.given}


def _starts_server(recipe: Mapping[str, Any]) -> bool:
    wanted = recipe.get("use_vllm") and recipe.get("vllm_mode", DEFAULTS["vllm_mode"]) == "server"
    return bool(wanted) and not devices.elsewhere(recipe)


# Who runs where


def _gpus(recipe: Mapping[str, Any], wanted: int | None) -> list[Gpu]:
    if recipe.get("use_cpu"):
        if wanted:
            raise ConfigError("gpus", wanted, "contradicts use_cpu=True", "leave one of them out")
        return []
    gpus = devices.visible()
    if wanted is not None and not 0 < wanted <= len(gpus):
        there = f"{len(gpus)} GPU{' is' if len(gpus) == 1 else 's are'} visible here"
        raise ConfigError(
            "gpus", wanted, f"cannot be had: {there}", f"give 1 to {len(gpus)}" if gpus else "leave it out"
        )
    return gpus[:wanted]


def _refuse_used(gpus: Sequence[Gpu]) -> None:
    for gpu in gpus:
        if gpu.used_by:
            raise UserError(
                f"GPU {gpu.number} is in use by {gpu.used_by}: end that, or name other GPUs in CUDA_VISIBLE_DEVICES"
            )


class Config(NamedTuple):
    """An accelerate config: where it is, and what it says."""

    path: Path
    says: dict[str, Any]


def _config(name: str) -> Config:
    """By its path, or by its name in accelerate_configs/."""
    path = find(name) if name.endswith((".yaml", ".yml", ".json")) else find(f"accelerate_configs/{name}.yaml")
    if not path.is_file():
        raise ConfigError("accelerate_config", name, "is not there", "give a file, or a name such as zero2")
    says = planner.read_recipe(path)
    launching.accelerate_config(name, says)
    if int(says.get("num_machines") or 1) > 1:
        reason = "is for several machines, and grpo-math train starts the processes of one"
        raise ConfigError("accelerate_config", name, reason, "run accelerate launch on each, as launch/slurm/ does")
    return Config(path, says)


def _arrange(
    recipe: Mapping[str, Any], gpus: Sequence[Gpu], asked: str | None, serves: bool
) -> tuple[Layout, Config | None]:
    """The layout, and the accelerate config of its processes (None: a single one without); says both, with why."""
    own = _config(asked) if asked is not None else None
    if not gpus:
        processes = int(own.says.get("num_processes") or 1) if own else 1
        return Layout("server" if serves else "transformers", processes, 0, 1, "on the CPU"), own
    configs: dict[str, Config | None] = {own.path.stem: own} if own else {"": None}
    if not own and not recipe.get("deepspeed") and not recipe.get("fsdp") and _installed("deepspeed"):
        whole = any(recipe.get(name) not in (None, 0, "none") for name in NEEDS_WHOLE)
        for name in ZERO:
            if not (whole and name.startswith("zero3")):
                configs[name] = _config(name)
    try:
        name, counted = planner.choose(
            recipe,
            {name: config.says if config else None for name, config in configs.items()},
            gpus=len(gpus),
            gpu_gb=min(gpu.gb for gpu in gpus),
        )
        layout, config, problems = counted.layout, configs[name], counted.problems
    except UserError as error:
        if isinstance(error, NotPlanned):
            _say("plan", str(error))
        elif serves:
            raise  # before a server is started for nothing; otherwise training says it
        layout, config, problems = _unplanned(recipe, len(gpus)), own, []
    if config is None and layout.policy > 1:
        config = _config("multi_gpu")
    _say("layout", f"{_roles(layout, gpus)} ({layout.why})")
    if config is not None:
        because = "asked for" if own else ("the first that fits" if config.path.stem in ZERO else "it fits")
        because = "nothing is known to fit" if problems else because
        _say("config", f"{config.path.stem}, {layout.policy} process{'es' if layout.policy > 1 else ''} ({because})")
    for problem in problems:
        _say("plan", f"may not fit: {problem}; grpo-math plan says what to change")
    return layout, config


def _unplanned(recipe: Mapping[str, Any], gpus: int) -> Layout:
    def divides(processes: int) -> bool:
        try:
            batch.plan({**DEFAULTS, **recipe}, set(recipe), processes)
        except ConfigError:
            return False
        return True

    return devices.uncounted(recipe, gpus, divides)


def _installed(package: str) -> bool:
    try:  # not find_spec: in a checkout, the folder deepspeed/ would look like the package
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _roles(layout: Layout, gpus: Sequence[Gpu]) -> str:
    said = []
    for role in layout.roles():
        numbers = [gpus[i].number for i in role["gpus"]]
        said.append(f"GPU {', '.join(map(str, numbers))}: {role['role']}")
    return "; ".join(said)


def _numbers(gpus: Sequence[Gpu]) -> str:
    return ",".join(str(gpu.number) for gpu in gpus)


# The server


class Start(NamedTuple):
    """How a server is started."""

    command: list[str]
    environment: dict[str, str]
    url: str


class Supervised:
    """A vLLM server under a keeper, whose output goes to the file ``log``, or to the terminal."""

    def __init__(self, start: Start, log: Path | None) -> None:
        self.start, self.log, self.url, self.restarts = start, log, start.url, 0
        self._open()

    def _open(self) -> None:
        with contextlib.ExitStack() as stack:
            output = None
            if self.log:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(open(self.log, "ab"))
            self.kept = Kept(self.start.command, environment=self.start.environment, output=output, grace=20.0)

    @property
    def running(self) -> bool:
        return self.kept.running

    def stop(self) -> None:
        self.kept.stop()

    def restart(self) -> None:
        self.kept.stop()
        self.restarts += 1
        self._open()

    def wait(self, seconds: float) -> None:
        """Until it answers, with a line of progress. Raises a `UserError` where it never does, or is of another
        version than training works with."""
        _say("server", f"{self.url}" + (f", log {self.log}" if self.log else ""))
        client = vllm_server.Server(self.url)
        try:
            client.wait(seconds, lambda: self.running, self._progress if self.log else None)
            version = client.check_version()
        except UserError:
            if self.running:
                self._tail()
                raise
        if not self.running:  # also where something else answers at its address
            raise UserError(self.ended())
        _say("server", f"vLLM {version} is ready", clear=True)

    def ended(self) -> str:
        """One line about a server that has gone, after the last lines of its log."""
        code = self.kept.wait()
        self._tail()
        where = f"its log, {self.log}, ends as above" if self.log else "its output is above"
        return f"the vLLM server ended with exit code {code}: {where}; put right what it names and start again"

    def _progress(self, seconds: float) -> None:
        if sys.stderr.isatty():
            line = (self._last(1) or [""])[0].strip()[:80]
            print(f"\r\033[Kserver   starting, {seconds:.0f} s  {line}", end="", file=sys.stderr, flush=True)
        elif int(seconds) % 30 == 0 and seconds >= 1:
            _say("server", f"starting, {seconds:.0f} s")

    def _last(self, n: int) -> list[str]:
        if self.log is None:
            return []
        with contextlib.suppress(OSError), open(self.log, encoding="utf-8", errors="replace") as file:
            return list(deque((line.rstrip() for line in file if line.strip()), n))
        return []

    def _tail(self) -> None:
        if sys.stderr.isatty():
            print(file=sys.stderr)
        for line in self._last(LOG_LINES):
            print(f"  | {line}", file=sys.stderr)


def _server(recipe: Mapping[str, Any], layout: Layout, gpus: str, port: int, host: str = "127.0.0.1") -> Start:
    """The command of a recipe's server. ``gpus``: the value of CUDA_VISIBLE_DEVICES, "" on a CPU."""
    settings = {**DEFAULTS, **recipe}
    executable = _executable()
    name = settings["model_name_or_path"]
    if not name:
        raise ConfigError("model_name_or_path", name, "is missing", "give a folder, a Hub id, or 'embedded'")
    if name == "embedded":
        from grpo_math.models import model_path

        name = model_path(name)
    dtype = recipe.get("dtype") or "auto"
    extra = [] if settings["model_revision"] == "main" else ["--revision", settings["model_revision"]]
    if settings["load_in_4bit"]:  # as the trainer has it
        extra += ["--quantization", "bitsandbytes"]
    if not gpus:
        extra += ["--enforce-eager"]
    elif not settings["vllm_max_model_length"]:
        extra += ["--max-model-len", "auto"]  # what fits beside the weights
    command = vllm_server.command(
        name,
        port=port,
        host=host,
        dtype="auto" if gpus and dtype == "float32" else dtype,  # float32 is for the optimizer; the plan counts 16 bit
        max_model_length=settings["vllm_max_model_length"],
        tensor_parallel=layout.tensor_parallel,
        data_parallel=max(1, layout.data_parallel),
        lora_rank=settings["lora_r"] if devices.sends_adapter(settings) else 0,
        seed=int(recipe.get("seed") or 0),
        extra=extra,
        executable=executable,
    )
    reached = "127.0.0.1" if host == "0.0.0.0" else host
    return Start(command, {**_environment(gpus), **vllm_server.environment()}, f"http://{reached}:{port}")


def _executable() -> str:
    """The `vllm` that serves; a `UserError` where there is none, or one of a version that TRL does not support."""
    named = os.environ.get("GRPO_MATH_VLLM")
    beside = Path(sys.executable).with_name("vllm")
    found = shutil.which(named or "vllm") or (str(beside) if beside.exists() and not named else None)
    remedy = "make an environment for it with launch/vllm_environment.sh and name its vllm in GRPO_MATH_VLLM"
    if not found:
        why = f"GRPO_MATH_VLLM={named!r} is no program" if named else "vllm is not installed"
        raise UserError(f"{why}, and the recipe wants a server (vllm_mode=server): {remedy}")
    python = Path(found).with_name("python")
    if python.exists():  # asking vllm itself takes ten seconds
        program = "from importlib.metadata import version; print(version('vllm'))"
        said = subprocess.run([str(python), "-c", program], capture_output=True, text=True).stdout.strip()
        minor, (first, last) = vllm_server.minor_of(said), vllm_server.SUPPORTED
        if minor and not first <= minor <= last:
            raise UserError(f"{found} is vLLM {said}, and TRL 1.16 works with {vllm_server.SPAN}: {remedy}")
    return found


def port_of(recipe: Mapping[str, Any], preferred: int) -> int:
    """The recipe's port, which has to be free; otherwise ``preferred``, or any that is free.

    A server binds its port half a minute after this look at it: a number that two runs would both prefer is no good
    where the address is handed over anyway.
    """
    if stated := recipe.get("vllm_server_port"):
        return _own_port("vllm_server_port", stated)
    return preferred if preferred and is_free(preferred) else free_port()


def _own_port(name: str, port: int) -> int:
    if not is_free(port):
        raise ConfigError(name, port, "is in use by another program", "choose another, or leave it out for a free one")
    return port


def _group_port(recipe: Mapping[str, Any]) -> list[str]:
    """TRL's weight transfer meets at a second port, 51216 unless it is taken."""
    if recipe.get("vllm_group_port") or devices.sends_adapter({**DEFAULTS, **recipe}) or is_free(51216):
        return []
    return ["--vllm_group_port", str(free_port())]


def free_port() -> int:
    """A port that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


# Training


def _training(argv: Sequence[str], config: Config | None, processes: int) -> list[str]:
    if config is None:
        return [sys.executable, "-m", TRAINING, *argv]
    launch = [sys.executable, "-m", "grpo_math.ranks", "--config_file", str(config.path)]
    launch += ["--num_processes", str(processes)]
    if not config.says.get("main_process_port"):
        launch += ["--main_process_port", str(free_port())]
    return [*launch, "-m", TRAINING, *argv]


def _environment(gpus: str) -> dict[str, str]:
    return {**os.environ, **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})}


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


def _say(what: str, text: str, clear: bool = False) -> None:
    start = "\r\033[K" if clear and sys.stderr.isatty() else ""
    print(f"{start}{what:<8} {text}", file=sys.stderr, flush=True)
