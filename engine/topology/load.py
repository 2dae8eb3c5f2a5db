"""Finds and reads a topology: a file of the user's, or one of those that come with the package."""

import difflib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import tomli

from engine.echo import plain
from engine.errors import UsageError
from engine.files import MIB, read_file
from engine.topology.schema import SECTIONS, Topology
from engine.topology.validate import check_tables, field_types

DEFAULT_TOPOLOGY = "cpu"
_SHOWN = 40


class TopologyError(UsageError):
    """Keys of a topology are wrong. usable: what is left without them, to look for more."""

    def __init__(self, message: str, usable: Topology) -> None:
        super().__init__(message)
        self.usable = usable


def packaged_topologies() -> tuple[str, ...]:
    """The names that `load_topology` knows without a file."""
    names = (entry.name for entry in resources.files("topologies").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def load_topology(
    path_or_name: str | Path = DEFAULT_TOPOLOGY, overrides: Sequence[str] = ()
) -> Topology:
    """Reads and checks a topology.

    path_or_name: a TOML file, or the name of a packaged one ("cpu", "cpu.toml"). A relative
    `model.path` in a file counts from the file's folder.
    overrides: `section.key=value`, the value as in TOML; a string needs no quotes.

    Raises UsageError with every problem, one a line, each with its place and remedy; that is a
    TopologyError where the file could be read.
    """
    name, text, folder = _read(str(path_or_name))
    try:
        tables: dict[str, Any] = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise UsageError(f"{name}: not valid TOML: {_lowered(plain(str(error), 200))}") from None
    except RecursionError:
        raise UsageError(f"{name}: not valid TOML: nested too deep") from None
    except ValueError:
        raise UsageError(f"{name}: not valid TOML: a number has too many digits") from None

    problems = []
    overridden = set()
    for override in overrides:
        try:
            section, key, value = _parse_override(override)
        except ValueError as error:
            problems.append(f"--set {plain(override)}: {error}")
            continue
        table = tables.setdefault(section, {})
        if isinstance(table, dict):  # anything else is reported with the rest
            table[key] = value
            overridden.add(f"{section}.{key}")

    sections, nodes, found = check_tables(tables, name, frozenset(overridden))
    topology = msgspec.convert(
        sections
        | {"nodes": nodes, "source": name, "folder": folder, "overridden": frozenset(overridden)},
        Topology,
    )
    problems += found
    if len(problems) > _SHOWN:
        problems[_SHOWN:] = [f"{name}: {len(problems) - _SHOWN} more problems like these"]
    if problems:
        raise TopologyError("\n".join(problems), topology)
    return topology


def _read(name: str) -> tuple[str, str, Path | None]:
    """What to call a topology, its text, and the folder that its relative paths count from."""
    path = Path(name)
    try:
        if path.exists() and not path.is_dir():
            text = read_file(path, MIB, pipes=True).decode("utf-8-sig")
            return name, text, path.absolute().parent
        if path.name == name:
            packaged = resources.files("topologies") / f"{name.removesuffix('.toml')}.toml"
            if packaged.is_file():
                return packaged.name, packaged.read_text("utf-8"), None
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}; give a TOML file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except ValueError as error:  # a null byte in the name
        raise UsageError(f"{name!r}: not a file name: {error}") from None
    what = "is a folder; give a TOML file" if path.is_dir() else "no such topology file"
    known = packaged_topologies()
    near = difflib.get_close_matches(path.name.removesuffix(".toml"), known, n=1)
    if near:
        raise UsageError(f'{name}: {what}; did you mean "{near[0]}", which comes with asapctl?')
    raise UsageError(f"{name}: {what}; these come with asapctl: {', '.join(known)}")


def _parse_override(override: str) -> tuple[str, str, Any]:
    place, equals, text = override.partition("=")
    section, dot, key = place.strip().partition(".")
    if section == "nodes":
        raise ValueError("[[nodes]] are several sections; write them in a topology file")
    if not equals:
        raise ValueError("expected section.key=value, as in attention.groups=2")
    if not dot:
        homes = [name for name in SECTIONS if section in field_types(name)] or ["section"]
        examples = " or ".join(f"{name}.{plain(section)}={plain(text.strip())}" for name in homes)
        raise ValueError(f"name the section too, as in {examples}")
    if section not in SECTIONS:
        near = difflib.get_close_matches(plain(section), SECTIONS, n=1)
        there = f"there are {', '.join(SECTIONS)}"
        remedy = f"did you mean {near[0]}.{plain(key)}?" if near else there
        raise ValueError(f'unknown section "{plain(section)}"; {remedy}')
    return section, key, _parse_value(text.strip())


def _parse_value(text: str) -> Any:
    try:
        table = tomli.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if table.keys() == {"value"} else text


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]
