"""Start, watch and stop the process of a vLLM server, and report why it ended.

train/serve.py and evaluation/engines.py choose the options.
"""

import contextlib
import os
import shutil
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution
from pathlib import Path

from grpo_math.errors import UserError, cut
from grpo_math.generation import vllm_server
from grpo_math.generation.vllm_env import SUPPORTED
from grpo_math.system.streams import say
from grpo_math.system.supervisor import SupervisedCommand

STARTUP = 1800.0  # seconds for a server to load its model
LOG_LINES = 15


class ServerProcess:
    """A vLLM server under a supervisor. The output goes to the file ``log``, or to the terminal."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], url: str, log: Path | None = None
    ) -> None:
        self.command = command
        self.environment = environment
        self.url = url
        self.log = log
        self._open()

    def _open(self) -> None:
        if self.log:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") if self.log else contextlib.nullcontext() as output:
            self.supervised = SupervisedCommand(self.command, environment=self.environment, output=output, grace=20.0)

    @property
    def running(self) -> bool:
        return self.supervised.running

    def stop(self) -> None:
        self.supervised.stop()

    def restart(self) -> None:
        self.supervised.stop()
        self._open()

    def wait(self, seconds: float) -> None:
        """Wait until the server answers. Raises `UserError` if it does not, or if its version is not supported."""
        say("server", f"{self.url}" + (f", log {self.log}" if self.log else ""))
        client = vllm_server.Server(self.url)
        try:
            client.wait(seconds, lambda: self.running, _progress if self.log else None)
            version = client.check_version()
        except UserError:
            # The error of a process that has ended is in its log: `ended` reports it below.
            if self.running:
                self._tail()
                raise
        # A port may also be in use by another program, which answers in its place.
        if not self.running:
            raise UserError(self.ended())
        say("server", f"vLLM {version} is ready")

    def ended(self) -> str:
        """Print the last lines of the log, and return one line about a server that has ended."""
        code = self.supervised.wait()
        self._tail()
        last_lines = [cut(line.strip()) + ", " for line in self._last(1)]
        where = f"{''.join(last_lines)}its log, {self.log}, ends as above" if self.log else "its output is above"
        return f"the vLLM server ended with exit code {code}: {where}; correct what it names and start again"

    def _last(self, n: int) -> list[str]:
        # The log of a long run is large, so only its last lines stay in memory. Without a log the list is empty.
        with open(self.log or os.devnull, encoding="utf-8", errors="replace") as file:
            return list(deque((line.rstrip() for line in file if line.strip()), n))

    def _tail(self) -> None:
        for line in self._last(LOG_LINES):
            print(f"  | {line}", file=sys.stderr)


def executable(supported: str = SUPPORTED) -> str:
    """Return the path of `vllm`. Raises `UserError` if `vllm` is missing, or if its version is not ``supported``."""
    configured = os.environ.get("GRPO_MATH_VLLM")
    # An environment that was not activated is not on PATH, but its vllm is next to its Python.
    sibling = Path(sys.executable).with_name("vllm")
    path = shutil.which(configured or "vllm") or (str(sibling) if sibling.exists() and not configured else None)
    if not path:
        why = f"GRPO_MATH_VLLM={configured!r} is not a program" if configured else "vllm is not installed"
        remedy = "make an environment for it: export GRPO_MATH_VLLM=$(grpo-math serve --make_env)"
        raise UserError(f"{why}, and a vLLM server is to be started: {remedy}")
    # The server itself answers only when its model is loaded.
    packages = map(str, Path(path).resolve().parents[1].glob("lib/python*/*-packages"))
    for installed in Distribution.discover(name="vllm", path=[*packages]):
        vllm_server.require_version(path, installed.version, supported)
    return path


def _progress(seconds: float) -> None:
    """Print every 30 seconds how long the server has been loading.

    >>> with contextlib.redirect_stderr(sys.stdout):
    ...     for seconds in (0.4, 29.9, 30.4, 31.4):
    ...         _progress(seconds)
    server   starting, 30 s
    """
    if int(seconds) % 30 == 0 and seconds >= 1:
        say("server", f"starting, {seconds:.0f} s")
