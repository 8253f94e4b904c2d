"""Requests to a server that the user names, through one httpx client with timeouts and retries.

Redirects are not followed, so a key reaches no other address. Proxies of the environment are not used for this machine.
No message contains the key.
"""

import ssl
import time
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from grpo_math.errors import UserError, first_line
from grpo_math.redact import one_line
from grpo_math.system.addresses import is_this_machine
from grpo_math.system.reading import from_json

BUSY = (429, 500, 502, 503, 504)  # statuses of a server that may answer later


class ServerError(UserError):
    """A server's answer that is not a result. ``status`` is the HTTP status, or None if no answer came."""

    def __init__(self, message: str, status: int | None = None) -> None:
        self.status = status
        super().__init__(message)


@cache  # reading the certificates takes 50 milliseconds
def _certificates() -> ssl.SSLContext:
    """Return the system's certificates, which may include a company's. httpx's default is certifi's list."""
    return ssl.create_default_context()


class Client:
    """Requests to one address. ``timeout``: seconds for one answer; ``retries``: how often a request is sent again if
    no answer comes or the server is busy, after 0.5 seconds, then 1, 2, 4 and so on.

    ``key``: that of a vLLM server. ``proxies``: use those of the environment, except for this machine.
    """

    def __init__(self, url: str, *, timeout: float, retries: int = 0, key: str = "", proxies: bool = True) -> None:
        # Imported here: the import takes 0.1 seconds, and most commands send nothing.
        import httpx

        self.url = url.rstrip("/")
        self.retries = retries
        self._key = key
        # InvalidURL is not a RequestError.
        self._failures = (httpx.RequestError, httpx.InvalidURL)
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=timeout,
            trust_env=proxies and not is_this_machine(urlsplit(url).hostname),
            verify=_certificates(),
            # Keep no connection: its server may have restarted since. Do not limit their number: httpx allows 100, and
            # a request that waits for a connection uses up its timeout.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    def ask(self, path: str, body: Any = None, *, retries: int | None = None, **options: Any) -> Any:
        """Return the JSON of an answer, or its text if it is not JSON. A request with a body is a POST.

        ``options`` are httpx's, such as ``headers``. Raises `ServerError`.
        """
        # httpx retries connections alone. A busy server, and one that restarts within an answer, need this loop.
        left, pause = self.retries if retries is None else retries, 0.5
        while True:
            try:
                return self._once(path, body, options)
            except ServerError as error:
                if not left or error.status not in (None, *BUSY):
                    raise
            time.sleep(pause)
            left, pause = left - 1, 2 * pause

    def _once(self, path: str, body: Any, options: dict[str, Any]) -> Any:
        method, url = "GET" if body is None else "POST", self.url + path
        try:
            response = self._http.request(method, url, json=body, **options)
        except self._failures as error:
            raise ServerError(f"{url} does not answer ({first_line(error)}): check that the server runs") from None
        text = response.content.decode(errors="replace")
        if response.status_code == 401:
            raise ServerError(f"{self.url} requires a key: set VLLM_API_KEY to the server's", 401)
        if not response.is_success:
            # The server may repeat the request, with the key.
            message = one_line(text, self._key) or response.reason_phrase
            raise ServerError(f"{url} answers {response.status_code}: {message}", response.status_code)
        try:
            return from_json(text)
        except ValueError:
            return text


def reachable(url: str, seconds: float) -> bool:
    """Return True if a server answers, with any status."""
    try:
        Client(url, timeout=seconds).ask("")
    except ServerError as error:
        return error.status is not None
    return True
