"""uvicorn's HTTP/1.1 protocol with limits on clients that are slow or endless before a request."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10
_TOO_LARGE = "the headers are too large"


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections whose headers do not end in time, or at all.

    uvicorn itself waits for headers forever. Bodies are the application's to limit.
    """

    def __init__(self, *args: Any, headers_timeout_s: float, **more: Any) -> None:
        super().__init__(*args, **more)
        self._headers_timeout_s = headers_timeout_s
        self._deadline: asyncio.TimerHandle | None = None  # None: headers are complete
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._deadline is not None:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(431, _TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_headers()

    def on_headers_complete(self) -> None:
        self._end_wait()
        # They may have come in one piece with their end, of which data_received saw nothing.
        if len(self.url) + sum(len(n) + len(v) + 4 for n, v in self.headers) > MAX_HEADER_BYTES:
            self._refuse(431, _TOO_LARGE)
            raise ValueError(_TOO_LARGE)  # so that the parser takes nothing more
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        # Nobody reads a body that was not wanted; the client could send it forever.
        unread = self.cycle.more_body and not self.pipeline
        super().on_response_complete()
        if unread:
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        # close() would wait for a client that has stopped reading its answer.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _await_headers(self) -> None:
        if self._deadline is None:
            self._header_bytes = 0
            self._deadline = self.loop.call_later(self._headers_timeout_s, self._too_late)

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._refuse(408, "the headers did not come in time")

    def _refuse(self, status: int, message: str) -> None:
        self._end_wait()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # else another answer is under way
            self.transport.write(refusal(status, message))
        self.transport.close()


def refusal(status: int, message: str) -> bytes:
    """A whole response for what never became a request. `message` is plain ASCII text."""
    body = b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":null}}'
    body %= message.encode().replace(b'"', b"'")
    return (
        b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n%b" % (status, len(body), body)
    )
