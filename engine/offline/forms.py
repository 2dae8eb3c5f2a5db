"""The outer shape of an input line: OpenAI's batch request or one of the short forms."""

from typing import Any

import msgspec

from engine.api.ids import record_id
from engine.api.types import Kind, Origin, RequestError
from engine.offline.lines import MAX_LINE_BYTES, Line

_URLS: dict[str, Kind] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
_BATCH_KEYS = {"custom_id", "id", "method", "url", "body"}
_SHAPES = (
    'expected {"custom_id", "method", "url", "body"}, or one of "prompt", "prompt_token_ids" '
    'and "messages"'
)
_decode = msgspec.json.Decoder().decode


def read_line(line: Line) -> tuple[Origin, dict[str, Any] | RequestError]:
    """The line's origin and its object, or why it has none.

    A line whose id cannot be read goes by `line-N`.
    """
    raw = line.data if line.data is not None else b""
    fallback = f"line-{line.number}"
    try:
        document = _decode_object(line)
        custom_id = _custom_id(document) or fallback
        return Origin(line.number, custom_id, record_id(custom_id, raw)), document
    except RequestError as failure:
        return Origin(line.number, fallback, record_id(fallback, raw)), failure


def split_form(document: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
    """What kind of answer the line wants, and the parameters of its request.

    Raises RequestError for anything that is neither shape.
    """
    if any(key in document for key in ("body", "url", "method")):
        return _batch_form(document)
    prompts = [key for key in ("prompt", "prompt_token_ids", "messages") if key in document]
    if len(prompts) != 1:
        has = "it has " + " and ".join(prompts) if prompts else "it has none of them"
        raise RequestError(f"{_SHAPES}; {has}", code="invalid_shape")
    body = {key: value for key, value in document.items() if key not in ("id", "custom_id")}
    return ("chat" if prompts == ["messages"] else "completion"), body


def _batch_form(document: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
    for key in document:
        if key not in _BATCH_KEYS:
            raise RequestError(
                f"unknown key {key!r} beside body; parameters belong inside body",
                param=key,
                code="unknown_parameter",
            )
    url = document.get("url")
    if not isinstance(url, str) or url not in _URLS:
        raise RequestError(
            f"url must be one of {', '.join(_URLS)}, not {url!r}", param="url", code="invalid_url"
        )
    if document.get("method") != "POST":
        raise RequestError(
            f'method must be "POST", not {document.get("method")!r}',
            param="method",
            code="invalid_method",
        )
    body = document.get("body")
    if not isinstance(body, dict):
        raise RequestError("body must be an object", param="body", code="invalid_type")
    return _URLS[url], body


def _decode_object(line: Line) -> dict[str, Any]:
    if line.data is None:
        raise RequestError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB", code="too_long")
    try:
        line.data.decode()
        document = _decode(line.data)
    except UnicodeDecodeError as error:
        raise RequestError(f"invalid UTF-8 at byte {error.start}", code="invalid_utf8") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"not JSON: {error}", code="invalid_json") from None
    if not isinstance(document, dict):
        raise RequestError(f"not an object but {_name(document)}; {_SHAPES}", code="invalid_shape")
    return document


def _custom_id(document: dict[str, Any]) -> str | None:
    given = [key for key in ("custom_id", "id") if document.get(key) is not None]
    if len(given) == 2:
        raise RequestError("both custom_id and id are given", param="id", code="invalid_shape")
    if not given:
        return None
    value = document[given[0]]
    if not isinstance(value, str) or not value:
        raise RequestError(
            f"{given[0]} must be a string that is not empty, not {value!r:.60}",
            param=given[0],
            code="invalid_type",
        )
    return value


def _name(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", list: "an array", int: "a number"}
    return names.get(type(value), "a number")
