"""The bytes of a request -> what is asked of the engine and of the answer's form."""

from typing import Any

import msgspec

from engine.api.document import decode_json
from engine.api.parameters import convert
from engine.api.parse import Parser
from engine.api.types import Kind, Origin, Prompt, RequestError
from engine.api.wording import show
from engine.serve.kv_transfer import wants_kv


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_usage: a last chunk with the usage. continuous_usage_stats: in every chunk.

    include_obfuscation pads chunks against onlookers; there is one chunk, so nothing to hide.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class _HttpOnly(msgspec.Struct, frozen=True):
    """What a request over HTTP may say beyond what the line of a file may."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    kv_transfer_params: dict[str, Any] | None = None


class Asked(msgspec.Struct, frozen=True):
    """stream: None for an answer in one piece. keep_kv: write the KV cache, say where it is."""

    prompts: list[Prompt]
    stream: StreamOptions | None
    keep_kv: bool


def parse_object(raw: bytes) -> dict[str, Any]:
    """Raises RequestError (400)."""
    document = decode_json(raw)
    if not isinstance(document, dict):
        raise RequestError("the body must be a JSON object", code="invalid_type")
    return document


def parse_request(raw: bytes, kind: Kind, origin: Origin, model: str, parser: Parser) -> Asked:
    """Raises RequestError: 404 for another model than `model`, else 400."""
    body = parse_object(raw)
    check_model(body, model)
    names = _HttpOnly.__struct_fields__
    http = convert({name: body.pop(name) for name in names if name in body}, _HttpOnly)
    if http.stream_options is not None and not http.stream:
        raise RequestError(
            "stream_options needs stream: true", param="stream_options", code="invalid_value"
        )
    prompts = parser.parse(origin, kind, body)
    keep_kv = wants_kv(http.kv_transfer_params)
    if keep_kv and len(prompts) > 1:
        raise RequestError(
            "kv_transfer_params needs a request with one prompt",
            param="kv_transfer_params",
            code="several_prompts",
        )
    return Asked(
        prompts, (http.stream_options or StreamOptions()) if http.stream else None, keep_kv
    )


def check_model(body: dict[str, Any], model: str) -> None:
    """Raises RequestError (404) when the body names another model. It may name none."""
    given = body.get("model", model)
    if isinstance(given, str) and given != model:
        raise RequestError(
            f"the model {show(given)} is not served here; {show(model)} is",
            param="model",
            code="model_not_found",
            status=404,
        )
