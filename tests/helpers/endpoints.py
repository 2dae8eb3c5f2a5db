"""A small HTTP server in a thread, which answers as a test says."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import msgspec


class Asked(NamedTuple):
    path: str
    body: Any
    authorization: str | None
    connection: int  # the client's port


# What is sent: a status and a JSON value, or bytes as they are.
Answer = tuple[int, Any] | bytes
ONE_TOKEN = {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}


class FakeEndpoint:
    """models: what /v1/models answers with. complete: answers completions."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[Asked] = []
        self.models: Answer = 200, {"object": "list", "data": [{"id": "m", "vocab_size": 50}]}
        self.complete: Callable[[Any], Answer] = lambda body: (200, ONE_TOKEN)

    @property
    def prompts(self) -> list[Any]:
        return [asked.body["prompt"] for asked in self.asked if asked.body is not None]

    def answer(self, asked: Asked) -> Answer:
        self.asked.append(asked)
        if asked.path == "/v1/models":
            return self.models
        return self.complete(asked.body) if asked.path == "/v1/completions" else (404, {})


@contextmanager
def fake_endpoint() -> Iterator[FakeEndpoint]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            size = int(self.headers["content-length"])
            self._reply(msgspec.json.decode(self.rfile.read(size)))

        def _reply(self, body: Any) -> None:
            key = self.headers["authorization"]
            answer = endpoint.answer(Asked(self.path, body, key, self.client_address[1]))
            if isinstance(answer, bytes):
                self.wfile.write(answer)
                self.close_connection = True
                return
            data = msgspec.json.encode(answer[1])
            self.send_response(answer[0])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exc_info()[1], ConnectionError):  # clients may leave
                super().handle_error(request, client_address)

    server = Server(("127.0.0.1", 0), Handler)
    endpoint = FakeEndpoint(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def slowly(seconds: float) -> Callable[[Any], Answer]:
    def complete(body: Any) -> Answer:
        time.sleep(seconds)
        return 200, ONE_TOKEN

    return complete
