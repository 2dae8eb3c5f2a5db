"""The routes."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from engine.api.types import RequestError
from engine.serve.front import Front
from engine.serve.gate import Gate, on_http_exception, on_request_error
from engine.serve.health import health_of, takes_prompts
from engine.serve.kv_store import KvStore
from engine.serve.open_file import OpenFileResponse
from engine.serve.reply import json_response
from engine.serve.requests import check_model
from engine.serve.tokenize import tokenize

_STARTED = int(time.time())

router = APIRouter()


def make_app(front: Front) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with front.running():
            yield

    app = FastAPI(
        openapi_url=None,  # bodies are checked by engine.api, of which pydantic knows nothing
        redirect_slashes=False,
        lifespan=lifespan,
        exception_handlers={
            RequestError: on_request_error,
            HTTPException: on_http_exception,
        },
    )
    app.state.front = front
    app.include_router(router)
    app.add_middleware(Gate, api_key=front.spec.api_key, metrics=front.metrics)
    return app


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    return await _front(request).answer(request, "completion")


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    return await _front(request).answer(request, "chat")


@router.get("/v1/models")
async def models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model(_front(request))]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    front = _front(request)
    check_model({"model": name}, front.spec.model)
    return json_response(_model(front))


@router.post("/tokenize")
async def tokens(request: Request) -> Response:
    front = _front(request)
    spec = front.spec
    with front.room() as room:
        raw = await front.read(request, room)
        answer = await front.work(
            len(raw), tokenize, raw, spec.model, spec.max_model_len, front.tokenizer
        )
        return json_response(answer)


@router.get("/v1/kv/{kv_id}")
async def fetch_kv(request: Request, kv_id: str) -> Response:
    front = _front(request)
    return OpenFileResponse(await front.in_thread(_store(front).fetch, kv_id))


@router.delete("/v1/kv/{kv_id}")
async def delete_kv(request: Request, kv_id: str) -> Response:
    front = _front(request)
    await front.in_thread(_store(front).delete, kv_id)
    return json_response({"id": kv_id, "object": "kv", "deleted": True})


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(request: Request) -> Response:
    """Whether it makes progress. 503 with what is wrong when no instance does."""
    status, problems = health_of(await _front(request).snapshots())
    code = 503 if status == "unhealthy" else 200
    return json_response({"status": status, "problems": problems}, code)


@router.api_route("/ready", methods=["GET", "HEAD"])
async def ready(request: Request) -> Response:
    """Whether to send prompts here: an instance is loaded, and not about to end."""
    takes = any(map(takes_prompts, await _front(request).snapshots()))
    return json_response({"ready": takes}, 200 if takes else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    text = await _front(request).metrics_text()
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _front(request: Request) -> Front:
    front: Front = request.app.state.front
    return front


def _store(front: Front) -> KvStore:
    if front.kv is None:
        raise RequestError(
            "this instance keeps no KV caches; start it with [serve] kv_dir",
            code="kv_not_found",
            status=404,
        )
    return front.kv


def _model(front: Front) -> dict[str, object]:
    paced = front.spec.paced
    return {
        "id": front.spec.model,
        "object": "model",
        "created": _STARTED,
        "owned_by": "asapctl",
        "max_model_len": front.spec.max_model_len,
        "vocab_size": front.spec.vocab_size,
        **({} if paced is None else {"paced": paced}),
    }
