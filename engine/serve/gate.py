"""What every request passes: the API key, a count of its answer, and errors in OpenAI's shape."""

import hmac
import logging

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.api.answers import error_body
from engine.api.types import RequestError
from engine.serve.metrics import Metrics
from engine.serve.reply import json_response

# Probes and scrapers have no key; what they see holds no prompt.
OPEN_PATHS = ("/health", "/ready", "/metrics")
_CLIENT_LEFT = 499
_RETRY_AFTER_S = "1"
# The request has not been read to its end, so no other can follow on its connection.
_CLOSING = (401, 405, 408, 413, 415)

log = logging.getLogger(__name__)


class Gate:
    """ASGI middleware around the routes."""

    def __init__(self, app: ASGIApp, api_key: str | None, metrics: Metrics) -> None:
        self._app = app
        self._api_key = None if api_key is None else api_key.encode()
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _CLIENT_LEFT

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if not self._may_pass(scope):
                await _unauthorized()(scope, receive, counted)
                return
            await self._app(scope, receive, counted)
        except ClientDisconnect:
            status = _CLIENT_LEFT
            await Response(status_code=status)(scope, receive, send)  # which nobody will see
        except Exception:
            log.exception("%s %s", scope["method"], scope["path"])
            if status != _CLIENT_LEFT:
                raise  # an answer has begun; uvicorn cuts the connection
            failure = RequestError("internal error; the server's log says more", status=500)
            await error_response(failure)(scope, receive, counted)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(path, str(status)).inc()

    def _may_pass(self, scope: Scope) -> bool:
        if self._api_key is None or scope["path"] in OPEN_PATHS:
            return True
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Compared in constant time, so that answers' times tell nothing of the key.
        given = key.strip().encode("latin-1")
        return scheme.lower() == "bearer" and hmac.compare_digest(given, self._api_key)


def error_response(failure: RequestError) -> Response:
    headers = {}
    if failure.status in (429, 503):
        headers["Retry-After"] = _RETRY_AFTER_S
    if failure.status in _CLOSING:
        headers["Connection"] = "close"
    return json_response(error_body(failure), failure.status, headers)


async def on_request_error(request: Request, error: RequestError) -> Response:
    return error_response(error)


async def on_http_exception(request: Request, error: HTTPException) -> Response:
    """Unknown paths and methods."""
    codes = {404: "not_found", 405: "method_not_allowed"}
    text = f"{request.method} {request.url.path}: {error.detail}"
    response = error_response(
        RequestError(text, code=codes.get(error.status_code), status=error.status_code)
    )
    response.headers.update(error.headers or {})
    return response


def _unauthorized() -> Response:
    response = error_response(
        RequestError(
            "the API key is missing or wrong; send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            status=401,
        )
    )
    response.headers["WWW-Authenticate"] = "Bearer"
    return response
