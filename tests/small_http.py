"""An HTTP server in a thread, whose answers a test gives.

`stop` is a server that went away; `start` opens it again at the same port.
"""

import threading
from collections.abc import Mapping
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Pass each request to the server."""

    def do_GET(self) -> None:
        self.server.handle(self)

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, *args: object) -> None:
        pass


class SmallHTTP(ThreadingHTTPServer):
    """A subclass has ``handle(request)``, which answers a request of any method."""

    request_queue_size = 2048  # as uvicorn's; 5 by default, and a busy machine then resets connections
    port = 0

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        super().__init__(("127.0.0.1", self.port), Handler)
        self.port = self.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        # The port is free when the loop has ended: it may be waiting for a connection.
        self.shutdown()
        self.server_close()


class AnsweringHTTP(SmallHTTP):
    """A server that gives the next of ``queue``, else what `answer` says: the path's text in ``answers``, or 404."""

    def __init__(self) -> None:
        self.queue: list[tuple[int, str]] = []
        self.answers: dict[str, str] = {}
        self.asked: list[str] = []  # the paths of all requests
        self.headers: list[Message] = []
        super().__init__()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(request.path)
        self.headers.append(request.headers)
        body = body_of(request)
        # huggingface_hub asks for this once a day, before its first request.
        is_planned = self.queue and request.path != "/api/agent-harnesses"
        status, text = self.queue.pop(0) if is_planned else self.answer(request.path, body)
        if self.socket.fileno() != -1:  # not stopped meanwhile
            send(request, status, text.encode())

    def answer(self, path: str, body: bytes) -> tuple[int, str]:
        return (200, self.answers[path]) if path in self.answers else (404, "")


def keys_sent(server: AnsweringHTTP) -> list[tuple[str, str | None]]:
    """The path and the header Authorization of each request."""
    return [(path, headers["Authorization"]) for path, headers in zip(server.asked, server.headers, strict=True)]


def body_of(request: BaseHTTPRequestHandler) -> bytes:
    return request.rfile.read(int(request.headers.get("Content-Length") or 0))


def send(
    request: BaseHTTPRequestHandler, status: int, data: bytes = b"", headers: Mapping[str, str] | None = None
) -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(data)
