"""JSON text -> its value, or a clear reason why it is none."""

import json
import re
from typing import Any

import msgspec

from engine.api.types import RequestError
from engine.api.wording import show
from engine.echo import cut

_decode = msgspec.json.Decoder().decode
_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def decode_json(data: bytes) -> Any:
    """Raises RequestError: not UTF-8, not JSON, or text that no UTF-8 can hold.

    The last is SurrogateError, which has the value all the same.
    """
    try:
        data.decode()
        return _decode(data)
    except UnicodeDecodeError as error:
        raise RequestError(f"invalid UTF-8 at byte {error.start}", code="invalid_utf8") from None
    except (msgspec.DecodeError, RecursionError) as error:
        if _ESCAPED.search(data):
            _check_surrogates(data)
        raise RequestError(f"not JSON: {error}", code="invalid_json") from None


class SurrogateError(RequestError):
    """value: the document; some of its strings cannot be encoded."""

    def __init__(self, where: str, surrogate: str, value: Any) -> None:
        escaped = f"\\u{ord(surrogate):04x}"
        super().__init__(
            f"unpaired surrogate {escaped} in {where}: half of a UTF-16 pair is no character; "
            "replace it where the text comes from",
            code="unpaired_surrogate",
        )
        self.value = value


def has_surrogate(text: str) -> bool:
    return _SURROGATE.search(text) is not None


def _check_surrogates(data: bytes) -> None:
    """Python's json takes what msgspec refuses, and nothing else that matters here."""
    try:
        value = json.loads(data)
        found = _find(value, "")
    except (ValueError, RecursionError):
        return
    if found is not None:
        raise SurrogateError(*found, value)


def _find(value: Any, where: str) -> tuple[str, str] | None:
    """The place and the first unpaired surrogate of `value`."""
    if isinstance(value, str):
        match = _SURROGATE.search(value)
        return None if match is None else (where or "the text", match[0])
    if isinstance(value, dict):
        for key, part in value.items():
            if match := _SURROGATE.search(key):
                return f"the key {show(key)}", match[0]
            name = cut(key)
            if found := _find(part, f"{where}.{name}" if where else name):
                return found
    if isinstance(value, list):
        for index, part in enumerate(value):
            if found := _find(part, f"{where}[{index}]"):
                return found
    return None
