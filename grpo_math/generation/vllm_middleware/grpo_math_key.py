"""Require the key on every path of a vLLM server, by ``--middleware grpo_math_key.ApiKeyMiddleware``.

vLLM itself checks the key on the paths under /v1 and a few more. The development paths, which the sync needs, put the
engine to sleep, change its weights and call methods of its workers. Other paths generate (/invocations). With
`ApiKeyMiddleware` all paths require the key of VLLM_API_KEY, except /health, which reveals nothing. A server without
this variable does not start.

Does not encrypt: the connection is plain HTTP.
"""

import hmac
import os
from typing import Any


class ApiKeyMiddleware:
    """The outermost ASGI middleware. It answers 401 to a request without ``Authorization: Bearer KEY``."""

    def __init__(self, app: Any) -> None:
        # Bytes, because `compare_digest` raises a TypeError for text that is not ASCII, which a client may send.
        self.app = app
        self.expected = f"Bearer {os.environ['VLLM_API_KEY'].strip()}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        header = dict(scope.get("headers", ())).get(b"authorization", b"")
        # Other messages (lifespan) come from the web server itself, at its start and end, and have no path.
        asks = scope["type"] in ("http", "websocket") and scope["path"] != "/health"
        # The time of `==` depends on the first wrong letter, so a client could find the key letter by letter.
        if not asks or hmac.compare_digest(header, self.expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            kind = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": kind})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
