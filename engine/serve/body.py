"""Reading a request's body: bounded in bytes and in time, and given up when the client leaves."""

import asyncio
import contextlib

from starlette.requests import ClientDisconnect, Request

from engine.api.types import RequestError
from engine.api.wording import show
from engine.serve.budget import Share

# Clients that write all before they read would not see an answer that comes while they write.
_LINGER_S = 2.0


async def read_body(request: Request, most_bytes: int, timeout_s: float, room: Share) -> bytes:
    """The body; `room` holds its bytes from then on.

    Raises RequestError: 413 over `most_bytes`, 408 after `timeout_s`, 415 when it is not announced
    as plain JSON, 429 when there is no room for it; ClientDisconnect when the client left.
    """
    _check_type(request)
    announced = _announced(request)
    too_large = RequestError(
        f"the body has more than {most_bytes} bytes", code="body_too_large", status=413
    )
    if announced > most_bytes:
        await _linger(request)
        raise too_large
    room.grow(announced)
    body = bytearray()

    async def read() -> None:
        more = True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body.extend(message.get("body", b""))
            more = message.get("more_body", False)
            if len(body) > most_bytes:
                if more:
                    await _linger(request)
                raise too_large
            if (unannounced := len(body) - room.held) > 0:
                room.grow(unannounced)

    try:
        await asyncio.wait_for(read(), timeout_s)
    except asyncio.TimeoutError:
        raise RequestError(
            f"the body did not come within {timeout_s:g} s", code="timeout", status=408
        ) from None
    return bytes(body)


async def left(request: Request) -> None:
    """Returns when the client has gone, or when its answer has been sent."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _check_type(request: Request) -> None:
    """A web page of another origin cannot send JSON unasked, but any other type it can."""
    encoding = ", ".join(request.headers.getlist("content-encoding")).strip()
    if encoding.lower() not in ("", "identity"):
        raise RequestError(
            f"the content encoding must be identity, not {show(encoding)}",
            code="unsupported_media_type",
            status=415,
        )
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise RequestError(
            f"the content type must be application/json, not {show(given)}"
            if given
            else "the content type is missing; it must be application/json",
            code="unsupported_media_type",
            status=415,
        )


def _announced(request: Request) -> int:
    given = request.headers.get("content-length", "0")
    return int(given) if given.isdecimal() else 0


async def _linger(request: Request) -> None:
    """Drops what still comes for a moment; a client that waits for our word is not told to send."""
    if request.headers.get("expect", "").lower() == "100-continue":
        return

    async def drain() -> None:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(drain(), _LINGER_S)
