"""Types and values in a request's own terms: JSON's spelling, and words in place of type names."""

import json
import re
import types
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec

from engine.echo import cut

_SHOWN = 60
_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "an array",
    dict: "an object",
}
_ITEMS = {int: " of whole numbers", dict: " of objects"}
_NAMES = {
    "int": "a whole number",
    "float": "a number with a fraction",
    "bool": "true or false",
    "str": "a string",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


def show(value: object) -> str:
    """`value` as JSON has it, in ASCII and cut short."""
    if isinstance(value, str):
        value = value[: _SHOWN + 1]
    try:
        return cut(json.dumps(value), _SHOWN)
    except (RecursionError, ValueError):  # deeper, or a number with more digits, than Python shows
        return "such a value"


def expected(hint: Any) -> str:
    """A field's type in words: `a whole number from 0 to 20`. None is left out of a union."""
    if get_origin(hint) in {Union, types.UnionType}:
        kinds = [part for part in get_args(hint) if part is not types.NoneType]
        return " or ".join(dict.fromkeys(map(expected, kinds)))
    if get_origin(hint) is Annotated:
        kind, meta = get_args(hint)
        return _KINDS[kind] + _range(meta)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return "an object"
    kind = get_origin(hint) or hint
    if kind is not list:
        return _KINDS[kind]
    (items,) = get_args(hint)
    return _KINDS[kind] + _ITEMS.get(get_origin(items) or items, "")


def mismatch(error: msgspec.ValidationError) -> tuple[str, str]:
    """Where inside a value a mismatch is (`[3]`, `.name`, or nothing), and what it is in words."""
    problem, _, path = str(error).partition(" - at `$")
    match = re.fullmatch(r"Expected `([^`]*)`, got `([^`]*)`", problem)
    if match is None:
        return path.rstrip("`"), cut(problem[0].lower() + problem[1:], 2 * _SHOWN)
    wanted = [_NAMES.get(name, name) for name in match[1].split(" | ") if name != "null"]
    got = "a boolean" if match[2] == "bool" else _NAMES.get(match[2], match[2])
    return path.rstrip("`"), f"must be {' or '.join(wanted)}, not {got}"


def accepts(hint: Any, kind: type) -> bool:
    """Whether values of the plain type `kind` can be right for a field of this type."""
    if get_origin(hint) in {Union, types.UnionType}:
        return any(accepts(part, kind) for part in get_args(hint))
    if get_origin(hint) is Annotated:
        return accepts(get_args(hint)[0], kind)
    plain = get_origin(hint) or hint
    return plain is kind or (plain is float and kind is int)


def _range(meta: msgspec.Meta) -> str:
    if meta.gt is not None:
        return f" above {meta.gt} and at most {meta.le}"
    if meta.max_length is not None:
        return f" of at most {meta.max_length} characters"
    if meta.le is not None:
        return f" from {meta.ge} to {meta.le}"
    return f" of at least {meta.ge}"
