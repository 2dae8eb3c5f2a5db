"""HTTP/1.1 for load: as many connections as requests under way, and little work for each.

A connection that has answered is used again, the youngest first.
"""

import asyncio
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from engine.echo import plain
from engine.errors import RunError, UsageError

_MOST_ANSWER_BYTES = 64 << 20
_NO_ENDPOINT = "give the address of an endpoint, as http://127.0.0.1:8000"


@dataclass(frozen=True)
class Address:
    """path: goes before that of each request; without a slash at its end."""

    host: str
    port: int
    is_tls: bool
    path: str

    @property
    def url(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.host_header}{self.path}"

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


def parse_url(text: str) -> Address:
    """text: with or without http://, and the /v1 of OpenAI's clients. Raises UsageError."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{plain(text)}: {error}; {_NO_ENDPOINT}") from None
    path = parts.path.rstrip("/").removesuffix("/v1")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise UsageError(f"{plain(text)} is no http:// or https:// address; {_NO_ENDPOINT}")
    if parts.username is not None or not (host + path).isascii() or not (host + path).isprintable():
        raise UsageError(f"{plain(text)}: a name, or a character, that has no place in it")
    is_tls = parts.scheme == "https"
    return Address(host, port or (443 if is_tls else 80), is_tls, path)


class HttpClient:
    """Used from one event loop."""

    def __init__(self, address: Address, headers: Mapping[str, str] | None = None) -> None:
        """headers: of every request."""
        self._address = address
        self._ssl = ssl.create_default_context() if address.is_tls else None
        self._host = address.host  # its number, once one has answered
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._headers = (
            f"Host: {address.host_header}\r\nAccept: application/json\r\n"
            f"Accept-Encoding: identity\r\n{more}"
        )
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """The status and the body of the answer. Raises RunError: there was none.

        body: JSON. When cancelled, the connection is closed, by which servers see it.
        """
        length = (
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        )
        head = f"{method} {self._address.path}{path} HTTP/1.1\r\n{self._headers}{length}\r\n"
        data = head.encode() + body
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_open:
                continue
            try:
                return await self._exchange(connection, data)
            except _UnusedError:  # the server closed it meanwhile; it did not see the request
                continue
        try:
            return await self._exchange(await self._connect(), data)
        except _UnusedError as error:
            raise RunError(str(error)) from None

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, connection: "_Connection", data: bytes) -> tuple[int, bytes]:
        try:
            answer = await connection.exchange(data)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        return answer

    async def _connect(self) -> "_Connection":
        address = self._address
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection,
                self._host,
                address.port,
                ssl=self._ssl,
                server_hostname=address.host if address.is_tls else None,
            )
        except (OSError, ssl.SSLError, UnicodeError) as error:
            raise RunError(f"cannot connect to {address.url}: {_reason(error)}") from None
        self._host = connection.peer_host or self._host
        return connection


def _reason(error: Exception) -> str:
    """asyncio's own words name the address once more."""
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error)


class _UnusedError(Exception):
    """A connection ended before anything of an answer came."""


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    @property
    def peer_host(self) -> str | None:
        peer = self._transport.get_extra_info("peername")
        return peer[0] if isinstance(peer, tuple) else None

    async def exchange(self, data: bytes) -> tuple[int, bytes]:
        """Raises RunError, _UnusedError."""
        self._begin()
        self._seen = False
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return await self._answer

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()  # nobody asked
            return
        self._seen = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(RunError("what answers does not speak HTTP"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._answer is None or self._answer.done():
            return
        if self._until_end and exc is None:
            self.on_message_complete()
        elif self._seen:
            self._fail(RunError("the connection ended within the answer"))
        else:
            self._fail(_UnusedError("the connection was closed without an answer"))

    def on_message_begin(self) -> None:
        self._body = bytearray()
        self._has_length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._until_end = not self._has_length and self._parser.get_status_code() >= 200

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > _MOST_ANSWER_BYTES:
            self._fail(RunError(f"the answer has more than {_MOST_ANSWER_BYTES >> 20} MiB"))

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # that the answer will come
            return
        if self._until_end or not self._parser.should_keep_alive():
            self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((status, bytes(self._body)))

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._has_length = self._until_end = False

    def _fail(self, error: Exception) -> None:
        self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
