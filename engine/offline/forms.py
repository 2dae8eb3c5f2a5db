"""The outer shape of an input line: OpenAI's batch request or one of the short forms."""

from typing import Any

from engine.api.document import SurrogateError, decode_json, has_surrogate
from engine.api.ids import record_id
from engine.api.types import Kind, Origin, RequestError
from engine.api.wording import show
from engine.offline.lines import MAX_LINE_BYTES, Line

_URLS: dict[str, Kind] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
_BATCH_KEYS = {"custom_id", "id", "method", "url", "body"}
_LONGEST_ID = 512
_NAMED = 5  # unknown keys
_SHAPES = (
    'expected {"custom_id", "method", "url", "body"}, or one of "prompt", "prompt_token_ids" '
    'and "messages"'
)


def read_line(line: Line) -> tuple[Origin, dict[str, Any] | RequestError]:
    """The line's origin and its object, or why it has none.

    A line whose id cannot be read goes by `line-N`.
    """
    raw = line.data if line.data is not None else b""
    custom_id = f"line-{line.number}"
    content: dict[str, Any] | RequestError
    try:
        content = _decode_object(line)
        custom_id = _custom_id(content) or custom_id
    except SurrogateError as failure:
        content = failure
        custom_id = _readable_id(failure.value) or custom_id
    except RequestError as failure:
        content = failure
    return Origin(line.number, custom_id, record_id(custom_id, raw)), content


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
    unknown = [key for key in document if key not in _BATCH_KEYS]
    if unknown:
        named = ", ".join(map(show, unknown[:_NAMED]))
        named += ", ..." if len(unknown) > _NAMED else ""
        raise RequestError(
            f"unknown {named} beside body; parameters belong inside body",
            param=unknown[0],
            code="unknown_parameter",
        )
    url, method, body = (document.get(key) for key in ("url", "method", "body"))
    if not isinstance(url, str) or url not in _URLS:
        must = f"must be {' or '.join(map(show, _URLS))}"
        raise RequestError(_wrong("url", url, must), param="url", code="invalid_url")
    if method != "POST":
        raise RequestError(
            _wrong("method", method, 'must be "POST"'), param="method", code="invalid_method"
        )
    if not isinstance(body, dict):
        raise RequestError(
            _wrong("body", body, "must be an object"), param="body", code="invalid_type"
        )
    return _URLS[url], body


def _wrong(key: str, value: object, must: str) -> str:
    return f"{key} is missing; it {must}" if value is None else f"{key} {must}, not {show(value)}"


def _decode_object(line: Line) -> dict[str, Any]:
    if line.data is None:
        raise RequestError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB", code="too_long")
    document = decode_json(line.data)
    if not isinstance(document, dict):
        raise RequestError(f"not an object but {_name(document)}; {_SHAPES}", code="invalid_shape")
    return document


def _readable_id(document: object) -> str | None:
    """The id of a line that cannot be done anyway."""
    try:
        custom_id = _custom_id(document) if isinstance(document, dict) else None
    except RequestError:
        return None
    return None if custom_id is None or has_surrogate(custom_id) else custom_id


def _custom_id(document: dict[str, Any]) -> str | None:
    given = [key for key in ("custom_id", "id") if document.get(key) is not None]
    if len(given) == 2:
        raise RequestError("both custom_id and id are given", param="id", code="invalid_shape")
    if not given:
        return None
    value = document[given[0]]
    if not isinstance(value, str) or not value:
        raise RequestError(
            f"{given[0]} must be a string that is not empty, not {show(value)}",
            param=given[0],
            code="invalid_type",
        )
    if len(value) > _LONGEST_ID:
        raise RequestError(
            f"{given[0]} has {len(value)} characters; at most {_LONGEST_ID}",
            param=given[0],
            code="invalid_value",
        )
    return value


def _name(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", list: "an array", int: "a number"}
    return names.get(type(value), "a number")
