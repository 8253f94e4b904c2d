"""Requests to a server that the user names, through one httpx client with timeouts and retries.

Redirects are not followed, so a key reaches no other address. Proxies of the environment are not used for this machine.
No message contains the key.
"""

import os
import ssl
import time
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from grpo_math.errors import ConfigError, UserError, first_line
from grpo_math.reading import from_json
from grpo_math.redact import one_line
from grpo_math.system.addresses import is_this_machine

BUSY = (429, 500, 502, 503, 504)  # statuses of a server that may answer later


class ServerError(UserError):
    """A server's answer that is not a result. ``status`` is the HTTP status, or None if no answer came."""

    def __init__(self, message: str, status: int | None = None) -> None:
        self.status = status
        super().__init__(message)


def read_key(variable: str, value: str | None = None) -> str:
    """Return the key in ``value`` or in the variable, without the line end that a key from a file may have.

    Raises `ConfigError` for a key that no header can carry, because h11's own error would show it.

    >>> read_key("KEY", "abc\\n")
    'abc'
    >>> read_key("KEY", "ab\\nc")
    Traceback (most recent call last):
    ...
    grpo_math.errors.ConfigError: KEY='***' contains characters other than printable ASCII: set it again
    """
    key = (value or os.environ.get(variable, "")).strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(variable, key, "contains characters other than printable ASCII", "set it again")
    return key


@cache  # reading the certificates takes 50 milliseconds
def _certificates() -> ssl.SSLContext:
    """Return the system's certificates, which may include a company's. httpx's default is certifi's list."""
    return ssl.create_default_context()


class Client:
    """Requests to one address. ``timeout``: seconds for one answer; ``retries``: how often a request is sent again if
    no answer comes or the server is busy, after 0.5 seconds, then 1, 2, 4 and so on.

    The key is ``key``, or the one in the variable ``key_variable``. ``proxies``: use those of the environment, except
    for this machine.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        retries: int = 0,
        key_variable: str = "",
        key: str | None = None,
        proxies: bool = True,
    ) -> None:
        # Imported here: the import takes 0.1 seconds, and most commands send nothing.
        import httpx

        self.url = url.rstrip("/")
        self.retries = retries
        self._key_variable = key_variable
        self._key = read_key(key_variable, key)
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
            raise ServerError(f"{self.url} requires a key: set {self._key_variable} to the server's", 401)
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
