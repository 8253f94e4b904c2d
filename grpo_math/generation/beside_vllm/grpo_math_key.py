"""The key on every path of a vLLM server, as its ``--middleware grpo_math_key.Guard``.

vLLM's own guard covers the paths under /v1 and a few more. Its development paths, which the sync needs, put the engine
to sleep, change its weights and call methods of its workers, and others generate (/invocations): here they all want the
key of VLLM_API_KEY, but for /health, which says nothing. A server without that variable does not start.

Does not hide what is sent: the connection is plain HTTP.
"""

import hmac
import os
from typing import Any


class Guard:
    """ASGI middleware, the outermost: a request without ``Authorization: Bearer KEY`` is answered 401."""

    def __init__(self, app: Any) -> None:
        self.app, self.expected = app, f"Bearer {os.environ['VLLM_API_KEY'].strip()}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        said = dict(scope.get("headers", ())).get(b"authorization", b"")
        asks = scope["type"] in ("http", "websocket") and scope["path"] != "/health"
        if not asks or hmac.compare_digest(said, self.expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            kind = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": kind})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
