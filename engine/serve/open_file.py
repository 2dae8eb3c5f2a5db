"""A file that is open already as a response, whole or in part."""

import os
import re
from typing import BinaryIO

from starlette.datastructures import Headers
from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from engine.api.types import RequestError
from engine.serve.gate import error_response

_RANGE = re.compile(r"bytes=(?:([0-9]{1,18})-([0-9]{0,18})|-([0-9]{1,18}))")


class OpenFileResponse(FileResponse):
    """Closes the file in the end. It may have been removed from its folder meanwhile.

    One range of bytes is served; a Range header that says anything else does not count.
    """

    def __init__(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        super().__init__(
            f"/proc/self/fd/{file.fileno()}",
            media_type="application/octet-stream",
            stat_result=status,
        )
        self._file = file
        self._bytes = status.st_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            headers = Headers(scope=scope)
            start = _start(headers.getlist("range"), self._bytes)
            if start is not None and start < self._bytes:
                await super().__call__(scope, receive, send)
            elif start is not None and "if-range" not in headers:
                await self._unsatisfiable(scope, receive, send)
            else:
                rest = [header for header in scope["headers"] if header[0] != b"range"]
                await super().__call__({**scope, "headers": rest}, receive, send)

    async def _unsatisfiable(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = error_response(
            RequestError(
                f"the file has {self._bytes} bytes, and the range begins behind them",
                code="range_not_satisfiable",
                status=416,
            )
        )
        response.headers["Content-Range"] = f"bytes */{self._bytes}"
        await response(scope, receive, send)


def _start(given: list[str], size: int) -> int | None:
    """The first byte that is asked for; None unless the headers `given` are one plain range."""
    match = _RANGE.fullmatch(given[0].strip()) if len(given) == 1 else None
    if match is None:
        return None
    first, last, suffix = match.groups()
    if suffix:
        return size if int(suffix) == 0 else max(0, size - int(suffix))
    return None if last and int(last) < int(first) else int(first)
