"""The vLLM server of a run: its command, its ports, and a process that is started, watched and started again.

Does not sync weights to it (generation/sync.py does).
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_math.errors import ConfigError, UserError, cut
from grpo_math.generation import server
from grpo_math.generation.models import model_path
from grpo_math.planner import devices
from grpo_math.planner.devices import Gpu, Layout
from grpo_math.planner.settings import DEFAULTS
from grpo_math.run.ports import free_port, is_free
from grpo_math.train.keeper import Kept
from grpo_math.train.layout import environment, say

PORT = 8000
STARTUP = 1800.0  # seconds for a server to load its model, where vllm_server_timeout does not say
RESTARTS = 3
LOG_LINES = 15


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
        if self.log:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") if self.log else contextlib.nullcontext() as output:
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
        say("server", f"{self.url}" + (f", log {self.log}" if self.log else ""))
        client = server.Server(self.url)
        try:
            client.wait(seconds, lambda: self.running, self._progress if self.log else None)
            version = client.check_version()
        except UserError:
            if self.running:
                self._tail()
                raise
        if not self.running:  # also where something else answers at its address
            raise UserError(self.ended())
        say("server", f"vLLM {version} is ready", clear=True)

    def ended(self) -> str:
        """One line about a server that has gone, with its last words, after the last lines of its log."""
        code = self.kept.wait()
        self._tail()
        said = [cut(line.strip()) + ", " for line in self._last(1)]
        where = f"{''.join(said)}its log, {self.log}, ends as above" if self.log else "its output is above"
        return f"the vLLM server ended with exit code {code}: {where}; put right what it names and start again"

    def _progress(self, seconds: float) -> None:
        if sys.stderr.isatty():
            line = (self._last(1) or [""])[0].strip()[:80]
            print(f"\r\033[Kserver   starting, {seconds:.0f} s  {line}", end="", file=sys.stderr, flush=True)
        elif int(seconds) % 30 == 0 and seconds >= 1:
            say("server", f"starting, {seconds:.0f} s")

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


def start_of(
    recipe: Mapping[str, Any],
    layout: Layout,
    gpus: Sequence[Gpu],
    port: int,
    host: str = "127.0.0.1",
    more: Sequence[str] = (),
) -> Start:
    """How a recipe's server is started on these GPUs, none on a CPU. ``more``: further options of ``vllm serve``."""
    settings = {**DEFAULTS, **recipe}
    adapter = devices.sends_adapter(settings)
    executable = _executable()
    dtype = recipe.get("dtype") or "auto"
    extra = [] if settings["model_revision"] == "main" else ["--revision", settings["model_revision"]]
    if settings["load_in_4bit"]:  # as the trainer has it
        extra += ["--quantization", "bitsandbytes"]
    if not gpus:
        extra += ["--enforce-eager"]
    elif not settings["vllm_max_model_length"]:
        extra += ["--max-model-len", "auto"]  # what fits beside the weights
    command = server.command(
        model_path(settings["model_name_or_path"]),
        port=port,
        host=host,
        dtype="auto" if gpus and dtype == "float32" else dtype,  # float32 is for the optimizer; the plan counts 16 bit
        max_model_length=settings["vllm_max_model_length"],
        tensor_parallel=layout.tensor_parallel,
        data_parallel=max(1, layout.data_parallel),
        lora_rank=settings["lora_r"] if adapter else 0,
        adapters=1 + int(recipe.get("staleness") or 0),
        seed=int(recipe.get("seed") or 0),
        extra=[*extra, *more],
        executable=executable,
    )
    reached = "127.0.0.1" if host == "0.0.0.0" else host
    return Start(command, {**environment(gpus), **server.environment()}, f"http://{reached}:{port}")


def _executable() -> str:
    """The `vllm` that serves; a `UserError` where there is none, or one of a version that TRL does not support."""
    named = os.environ.get("GRPO_MATH_VLLM")
    beside = Path(sys.executable).with_name("vllm")
    found = shutil.which(named or "vllm") or (str(beside) if beside.exists() and not named else None)
    remedy = "make an environment for it: export GRPO_MATH_VLLM=$(grpo-math vllm-env)"
    if not found:
        why = f"GRPO_MATH_VLLM={named!r} is not a program" if named else "vllm is not installed"
        raise UserError(f"{why}, and the recipe wants a server (vllm_mode=server): {remedy}")
    python = Path(found).with_name("python")
    if python.exists():  # asking vllm itself takes ten seconds
        program = "from importlib.metadata import version; print(version('vllm'))"
        said = subprocess.run([str(python), "-c", program], capture_output=True, text=True).stdout.strip()
        minor, (first, last) = server.minor_of(said), server.SUPPORTED
        if minor and not first <= minor <= last:
            raise UserError(f"{found} is vLLM {said}, and TRL 1.16 works with {server.SPAN}: {remedy}")
    return found


def port_of(recipe: Mapping[str, Any], preferred: int) -> int:
    """The recipe's port, which has to be free; otherwise ``preferred``, or any that is free.

    A server binds its port half a minute after this look at it: a number that two runs would both prefer is no good
    where the address is handed over anyway.
    """
    if stated := recipe.get("vllm_server_port"):
        return own_port("vllm_server_port", stated)
    return preferred if preferred and is_free(preferred) else free_port()


def own_port(name: str, port: int) -> int:
    if not is_free(port):
        raise ConfigError(name, port, "is in use by another program", "choose another, or leave it out for a free one")
    return port


def group_port(recipe: Mapping[str, Any]) -> list[str]:
    """TRL's weight transfer meets at a second port, 51216 unless it is taken."""
    if recipe.get("vllm_group_port") or devices.sends_adapter({**DEFAULTS, **recipe}) or is_free(51216):
        return []
    return ["--vllm_group_port", str(free_port())]
