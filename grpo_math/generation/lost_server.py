"""Repeat a request to a vLLM server that was lost, when the server is back. The sampler and a teacher do this."""

from collections.abc import Callable
from typing import TypeVar

from accelerate.logging import get_logger

from grpo_math.errors import UserError
from grpo_math.generation.vllm_server import Server
from grpo_math.system.http import ServerError

logger = get_logger(__name__)
Answer = TypeVar("Answer")

RESTARTS = 3  # of a server during one request


class ServerUnavailable(UserError):
    """A server that did not come back. The trainer saves a checkpoint, and the run ends."""


def wait(server: Server, seconds: float, note: str) -> None:
    """Wait until the server answers, and check its version. ``note`` ends the line that is logged."""
    if not server.healthy():
        logger.warning_once(f"waiting up to {seconds:.0f} s for the vLLM server at {server.url}{note} ...")
    server.wait(seconds)
    server.check_version()


def outliving_restarts(
    url: str, call: Callable[[], Answer], lost: Callable[[ServerError], None], restore: Callable[[], None]
) -> Answer:
    """Return what ``call`` returns. If the server was lost, repeat the call after ``restore``.

    ``lost`` is called with the error of each failed call.
    """
    # Limited, because a request may itself be what ends the server each time.
    for _ in range(RESTARTS):
        try:
            return call()
        except ServerError as error:
            # 404: a restarted server does not know the adapter. Any other 4xx is an error of the request.
            if error.status is not None and error.status < 500 and error.status != 404:
                raise
            lost(error)
        try:
            restore()
        except ServerError as error:
            raise ServerUnavailable(str(error)) from None
    raise ServerUnavailable(f"{url} was lost {RESTARTS} times over one request: its own log says why")
