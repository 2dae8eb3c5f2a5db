"""Plain data as YAML, for people to read: blocks, and every string in JSON's quotes or bare."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Words that no reader of YAML takes for anything but a string.
_BARE = re.compile(r"[A-Za-z/][A-Za-z0-9/._-]*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def dump(documents: Sequence[Mapping[str, Any]]) -> str:
    """Each with `---` before it. A text of several lines is a literal block."""
    return "".join(f"---\n{''.join(_mapping(document, 0))}" for document in documents)


def _mapping(mapping: Mapping[str, Any], indent: int) -> Iterator[str]:
    for key, value in mapping.items():
        yield f"{' ' * indent}{_scalar(key)}:{_value(value, indent + 2)}"


def _value(value: Any, indent: int) -> str:
    """With what goes before it: a space, or the end of the line."""
    if isinstance(value, Mapping) and value:
        return "\n" + "".join(_mapping(value, indent))
    if isinstance(value, list) and value:
        return "\n" + "".join(_item(item, indent) for item in value)
    if isinstance(value, str) and _is_block(value):
        lines = "".join(f"{' ' * indent}{line}\n" if line else "\n" for line in value.split("\n"))
        return f" |-\n{lines}"
    return f" {_scalar(value)}\n"


def _item(value: Any, indent: int) -> str:
    if isinstance(value, Mapping) and value:
        text = "".join(_mapping(value, indent + 2))
        return f"{' ' * indent}- {text[indent + 2 :]}"
    return f"{' ' * indent}- {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _BARE.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)


def _is_block(text: str) -> bool:
    """Whether a literal block gives back exactly `text`."""
    lines = text.split("\n")
    printable = all(character.isprintable() or character == "\n" for character in text)
    return len(lines) > 2 and printable and bool(lines[-1]) and lines[0][:1].strip() != ""
