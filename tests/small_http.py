"""An HTTP server in a thread, whose answers a test gives.

`stop` is a server that went away; `start` opens it again at the same port.
"""

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any


class SmallHTTP:
    protocol = "HTTP/1.0"

    def __init__(self) -> None:
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request, of any method."""
        raise NotImplementedError

    def start(self) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = server.protocol

            def handle_one(self) -> None:
                server.handle(self)

            do_GET = do_HEAD = do_POST = do_PUT = handle_one

            def log_message(self, *args: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 2048  # as uvicorn's; 5 by default, and a busy machine then resets connections

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self.http: ThreadingHTTPServer | None = Quiet(("127.0.0.1", self.port), Handler)
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        http, self.http = self.http, None
        if http is not None:
            # The port is free when the loop has ended: it may be waiting for a connection.
            http.shutdown()
            http.server_close()


class AnsweringHTTP(SmallHTTP):
    """A server that gives the next of ``queue``, else the text of the path in ``answers``, else 404."""

    def __init__(self) -> None:
        self.queue: list[tuple[int, str]] = []
        self.answers: dict[str, str] = {}
        self.asked: list[tuple[str, str | None]] = []  # the path and the header Authorization of each request
        super().__init__()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append((request.path, request.headers.get("Authorization")))
        text = self.answers.get(request.path)
        status, text = self.queue.pop(0) if self.queue else (404 if text is None else 200, text or "")
        send(request, status, text.encode())


def body_of(request: BaseHTTPRequestHandler) -> bytes:
    return request.rfile.read(int(request.headers.get("Content-Length") or 0))


def send(
    request: BaseHTTPRequestHandler, status: int, data: bytes = b"", headers: Mapping[str, str] = MappingProxyType({})
) -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(data)), **headers}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(data)
