"""What an OpenAI-compatible endpoint says of itself: the model, and how long prompts may be."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import msgspec

from engine.bench.http_client import HttpClient
from engine.echo import plain
from engine.errors import RunError, UsageError

T = TypeVar("T")

_ANSWER_S = 20.0


class Endpoint(msgspec.Struct, frozen=True):
    """longest: prompt in tokens, and vocab_size, where it says so. paced: as in
    engine.control.messages.Snapshot.
    """

    model: str
    longest: int | None = None
    vocab_size: int | None = None
    paced: str | None = None


class _Model(msgspec.Struct):
    id: str
    owned_by: str = ""
    max_model_len: int | None = None  # vLLM's, SGLang's, ours
    vocab_size: int | None = None
    paced: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def find_endpoint(client: HttpClient, model: str | None) -> Endpoint:
    """model: None for the first that is served. Raises UsageError: no endpoint, or not that model;
    RunError: no answer.
    """
    path = "/v1/models"
    status, body = await in_time(client.request("GET", path), _ANSWER_S, path)
    if status in (401, 403):
        raise UsageError(f"{path}: {reason_of(status, body)}; give --api-key")
    if status >= 500:
        raise RunError(f"{path}: {reason_of(status, body)}")
    try:
        if status != 200:
            raise ValueError
        models = msgspec.json.decode(body, type=_Models).data
    except ValueError:
        raise UsageError(
            f"{path}: {reason_of(status, body)}: this is no OpenAI-compatible endpoint; "
            "give the address that /v1/models and /v1/completions are under"
        ) from None
    for each in models:
        if model is None or each.id == model:
            return _endpoint(each)
    served = ", ".join(plain(each.id) for each in models[:5]) or "none"
    raise UsageError(f"--model {plain(model or '')}: not served there; what is: {served}")


async def in_time(answer: Awaitable[T], seconds: float, what: str) -> T:
    """Raises RunError after `seconds`."""
    try:
        return await asyncio.wait_for(answer, seconds)
    except asyncio.TimeoutError:
        raise RunError(f"{what}: no answer within {seconds:g} s; is it up?") from None


def reason_of(status: int, body: bytes) -> str:
    """An error's message, in the shapes of OpenAI and FastAPI, or how the answer begins."""
    text = body[:80].decode(errors="replace")
    try:
        document = msgspec.json.decode(body)
    except ValueError:
        document = None
    if isinstance(document, dict):
        error = document.get("error", document)
        message = error.get("message", error.get("detail")) if isinstance(error, dict) else error
        text = message if isinstance(message, str) else text
    text = plain(" ".join(text.split()), 200)
    return f"HTTP {status}: {text}" if text else f"HTTP {status}"


def _endpoint(model: _Model) -> Endpoint:
    # Elsewhere the limit counts the token that is asked for, too.
    room = 0 if model.owned_by == "asapctl" else 1
    longest = None if model.max_model_len is None else model.max_model_len - room
    return Endpoint(model.id, longest, model.vocab_size, model.paced)
