"""The process of a vLLM server: it is started, watched and stopped, and says why it ended.

Does not choose its options (train/server.py and evaluation/backends.py do), and does not send it requests.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import NamedTuple

from grpo_math.errors import UserError, cut
from grpo_math.generation import server
from grpo_math.run.keeper import Kept
from grpo_math.run.streams import say

STARTUP = 1800.0  # seconds for a server to load its model, unless vllm_server_timeout is set
LOG_LINES = 15


class Start(NamedTuple):
    """How a server is started."""

    command: list[str]
    environment: dict[str, str]
    url: str


class ServerProcess:
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


def executable() -> str:
    """Return the path of `vllm`. Raises `UserError` if there is none, or if TRL does not support its version."""
    named = os.environ.get("GRPO_MATH_VLLM")
    beside = Path(sys.executable).with_name("vllm")
    found = shutil.which(named or "vllm") or (str(beside) if beside.exists() and not named else None)
    remedy = "make an environment for it: export GRPO_MATH_VLLM=$(grpo-math serve --make_env)"
    if not found:
        why = f"GRPO_MATH_VLLM={named!r} is not a program" if named else "vllm is not installed"
        raise UserError(f"{why}, and a vLLM server is to be started: {remedy}")
    python = Path(found).with_name("python")
    if python.exists():  # asking vllm itself takes ten seconds
        program = "from importlib.metadata import version; print(version('vllm'))"
        said = subprocess.run([str(python), "-c", program], capture_output=True, text=True).stdout.strip()
        minor, (first, last) = server.minor_of(said), server.SUPPORTED
        if minor and not first <= minor <= last:
            raise UserError(f"{found} is vLLM {said}, and TRL 1.16 works with {server.SPAN}: {remedy}")
    return found
