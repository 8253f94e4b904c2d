"""Repeat a request to a vLLM server that was lost, when the server is back. The sampler and a teacher do this."""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from accelerate.logging import get_logger

from grpo_math.errors import UserError, printed
from grpo_math.generation.vllm_server import Server
from grpo_math.system import signals
from grpo_math.system.http import ServerError

logger = get_logger(__name__)

RESTARTS = 3  # of a server during one request


class ServerUnavailable(UserError):
    """A server that did not come back, or not before a signal. The trainer saves a checkpoint, and the run ends."""


@cache
def one_line_for_lost_servers() -> None:
    """Let Python end a script with one line, and no traceback, for a server that does not answer."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, ServerUnavailable):
            print(f"error: {printed(error)}", file=sys.stderr)
        else:
            before(kind, error, trace)

    sys.excepthook = show


def wait(server: Server, seconds: float, start: str, note: str = "", has_version: bool = True) -> None:
    """Wait until the server answers, and check its version. ``start`` is the line about the command that starts it.

    A request to stop this process (system/signals.py) ends the wait.
    """

    def end_if_stopped(waited: float) -> None:
        if signals.running and signals.running.code:
            raise ServerUnavailable(f"stopped after {waited:.0f} s without an answer from {server.url}")

    if not server.healthy():
        # Once for each sync: all requests to a server that is lost fail alike.
        logger.warning_once(f"waiting up to {seconds:.0f} s for the vLLM server at {server.url}. {note}{start}")
    try:
        server.wait(seconds, progress=end_if_stopped)
    except ServerError as error:
        raise ServerUnavailable(f"{error}. {start}") from None
    if has_version:
        server.check_version()


def repeat_after_restart(url: str, call: Callable[[], Any], restore: Callable[[], None], note: str) -> Any:
    """Return what ``call`` returns. If the server was lost, repeat the call after ``restore``.

    ``note`` names the request in a warning.
    """
    # Limited, because a request may itself be what ends the server each time.
    for _ in range(RESTARTS):
        try:
            return call()
        except ServerError as error:
            # 404: a restarted server does not know the adapter. Any other 4xx is an error of the request.
            if error.status is not None and error.status < 500 and error.status != 404:
                raise
            # Once for each note: all requests to a server that is lost fail alike.
            logger.warning_once(f"{error}; a request {note} is repeated.")
        try:
            restore()
        except ServerError as error:
            raise ServerUnavailable(str(error)) from None
    raise ServerUnavailable(f"{url} was lost {RESTARTS} times over one request: its log has the reason")
