"""Reads a cost table: a TOML file of the user's, or one of those that come with the package."""

import difflib
import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import tomli

from engine.echo import plain, shown
from engine.errors import UsageError
from engine.files import MIB, exists, read_file
from engine.hardware.table import Hardware, Table

_FOLDER = "hardware"


def packaged_hardware() -> tuple[str, ...]:
    """The names that `load_hardware` knows without a file."""
    names = (entry.name for entry in (resources.files("topologies") / _FOLDER).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def load_hardware(name: str, path: Path | None = None) -> Hardware:
    """name: of a packaged table, unless there is a file at `path`, by default `name` itself.

    Raises UsageError with every problem, one a line, each with its place and remedy.
    """
    try:
        tables: dict[str, Any] = tomli.loads(_text(name, path or Path(name)))
    except tomli.TOMLDecodeError as error:
        raise UsageError(f"{name}: not valid TOML: {plain(str(error), 200)}") from None
    except (RecursionError, ValueError):
        raise UsageError(f"{name}: not valid TOML: nested too deep, or too long a number") from None
    problems = _problems(tables, Hardware, "")
    if problems:
        raise UsageError("\n".join(f"{name}: {problem}" for problem in problems))
    return msgspec.convert(tables, Hardware)


def _text(name: str, path: Path) -> str:
    try:
        if exists(path):
            return read_file(path, MIB).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}; give a TOML file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    known = packaged_hardware()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(known)}"
        raise UsageError(f"{plain(name)}: no such table of hardware; {remedy}")
    packaged = resources.files("topologies") / _FOLDER / f"{name}.toml"
    return packaged.read_text("utf-8")


def _problems(table: object, kind: type[Table], section: str) -> list[str]:
    """What keeps `table` from being a `kind`; section: its name, empty for the whole file."""
    if not isinstance(table, Mapping):
        return [f"[{section}]: expected a section, got {shown(table)}"]
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    problems = []
    for key in table.keys() - fields.keys():
        near = difflib.get_close_matches(plain(key), fields, n=1)
        remedy = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(fields)}"
        problems.append(f"{_place(section, plain(key))}: unknown key; {remedy}")
    for key, hint in fields.items():
        inner = isinstance(hint, type) and issubclass(hint, Table)
        if key not in table:
            what = f"section [{_join(section, key)}]" if inner else _place(section, key)
            problems.append(f"{what} is missing; set it")
        elif inner:
            problems += _problems(table[key], hint, _join(section, key))
        elif not _fits(table[key], hint):
            problems.append(
                f"{_place(section, key)}: expected {_words(hint)}, got {shown(table[key])}"
            )
    return sorted(problems)


def _fits(value: object, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return not isinstance(value, float) or math.isfinite(value)


def _words(hint: Any) -> str:
    kind, meta = hint.__origin__, hint.__metadata__[0]
    if kind is str:
        return "a string that is not empty"
    noun = "seconds" if kind is float else "a whole number"
    return f"{noun} from {meta.ge:g} to {meta.le:g}"


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _place(section: str, key: str) -> str:
    return f"[{section}] {key}" if section else key
