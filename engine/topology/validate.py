"""Checks the tables of a topology file against the schema, and finds every problem at once."""

import difflib
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

import msgspec

from engine.echo import plain
from engine.topology.nodes import explicit_problems
from engine.topology.schema import (
    SECTIONS,
    SUPPORTED,
    Attention,
    Experts,
    Node,
    Schedule,
    Section,
    locate,
)

Tables: TypeAlias = Mapping[str, Any]


def check_tables(
    tables: Tables, source: str, overridden: frozenset[str] = frozenset()
) -> tuple[dict[str, Section], tuple[Node, ...], list[str]]:
    """Returns the sections, the nodes and the problems; a key with a problem has its default, and
    with a problem of a node there are none.

    tables: section -> key -> value, as TOML has them. overridden: "section.key"s of `--set`.
    """
    problems: list[str] = []
    good: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    nodes: tuple[Node, ...] = ()
    for name, table in tables.items():
        if name == "nodes":
            nodes, found = _check_nodes(table)
            problems += [f"{source}: {problem}" for problem in found]
        elif name not in SECTIONS:
            problems.append(f"{source}: {_unknown_section(plain(name), table)}")
        elif not isinstance(table, Mapping):
            shape = "several sections" if isinstance(table, list) else _show(table)
            problems.append(f"{source}: [{name}]: expected one section, got {shape}")
        else:
            for key, value in table.items():
                problem = _check_key(name, key, value, f"{name}.{key}" in overridden)
                if problem:
                    problems.append(f"{locate(source, name, key, overridden)}: {problem}")
                else:
                    good[name][key] = value
    sections = {name: msgspec.convert(good[name], SECTIONS[name]) for name in SECTIONS}
    if not problems:
        problems = [
            f"{locate(source, section, key, overridden)}: {problem}"
            for section, key, problem in _check_combinations(sections)
        ]
        found = _check_placement(nodes, sections)
        nodes = () if found else nodes
        problems += [f"{source}: {problem}" for problem in found]
    return sections, nodes, problems


def _check_nodes(tables: object) -> tuple[tuple[Node, ...], list[str]]:
    if not isinstance(tables, list):
        got = "one section, [nodes]" if isinstance(tables, Mapping) else _show(tables)
        return (), [f"[[nodes]]: expected a section [[nodes]] for each node, got {got}"]
    problems = []
    hints = {field.name: field.type for field in msgspec.structs.fields(Node)}
    for number, table in enumerate(tables):
        where = name_node(number)
        if not isinstance(table, Mapping):
            problems.append(f"{where}: expected a section of keys, got {_show(table)}")
            continue
        for key, value in table.items():
            if key not in hints:
                near = _nearest(key, hints)
                remedy = f'did you mean "{near}"?' if near else f"it has {', '.join(hints)}"
                problems.append(f"{where} {plain(key)}: unknown key; {remedy}")
                continue
            try:
                msgspec.convert(value, hints[key])
            except msgspec.ValidationError:
                problems.append(
                    f"{where} {key}: expected a list of whole numbers from 0, as in [0, 1], "
                    f"got {_show(value)}"
                )
    return () if problems else msgspec.convert(tables, tuple[Node, ...]), problems


def name_node(number: int) -> str:
    """How a message names one of the `[[nodes]]`."""
    return f"[[nodes]] (node {number})"


def _check_placement(nodes: tuple[Node, ...], sections: Mapping[str, Section]) -> list[str]:
    """Whether the nodes have every group and every expert rank once."""
    if not nodes:
        return []
    attention, experts = sections["attention"], sections["experts"]
    assert isinstance(attention, Attention)
    assert isinstance(experts, Experts)
    groups, ranks = attention.groups, experts.ranks
    if groups == "auto" or ranks == "auto":
        missing = ["[attention] groups"] * (groups == "auto") + ["[experts] ranks"] * (
            ranks == "auto"
        )
        which = " and ".join(missing)
        return [f"[[nodes]]: say where each rank is, so {which} cannot be auto; set a number"]
    return [
        f"[[nodes]]: {problem}" if number is None else f"{name_node(number)} {problem}"
        for number, problem in explicit_problems(nodes, groups, ranks)
    ]


def _check_key(section: str, key: str, value: object, overridden: bool) -> str | None:
    hints = field_types(section)
    if key not in hints:
        return f"unknown key; {_place_of(key, section, overridden)}"
    try:
        msgspec.convert(value, hints[key])
    except msgspec.ValidationError:
        return f"expected {expected(hints[key])}, got {_show(value)}"
    supported = SUPPORTED.get((section, key))
    if supported and value not in supported:
        choice = _either(map(_show, supported))
        return f"this version has only {choice}, not {_show(value)}; change or remove the key"
    return None


def _check_combinations(sections: Mapping[str, Section]) -> Iterable[tuple[str, str, str]]:
    """Yields section, key and problem of values that are possible alone but not together."""
    attention, experts, schedule = (sections[name] for name in ("attention", "experts", "schedule"))
    assert isinstance(attention, Attention)
    assert isinstance(experts, Experts)
    assert isinstance(schedule, Schedule)
    if "paced" in (attention.device, experts.device):
        if attention.device != experts.device:
            computes = "attention" if attention.device != "paced" else "experts"
            yield computes, "device", 'the other side\'s is "paced", so this one has to be too'
        if attention.tensor_parallel > 1:
            yield (
                "attention",
                "tensor_parallel",
                "a paced rank stands for a whole group; leave it at 1",
            )
    if schedule.in_lockstep:
        for name, device in (("attention", attention.device), ("experts", experts.device)):
            if device in ("cuda", "npu"):
                yield name, "device", f'"{schedule.policy}" is built for "cpu" and "paced" only'
    least, most = schedule.min_batch_tokens, schedule.max_batch_tokens
    if least != "auto" and least > most:
        yield (
            "schedule",
            "min_batch_tokens",
            f"{least} is more than max_batch_tokens, {most}; lower it, or raise max_batch_tokens",
        )


def field_types(section: str) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(SECTIONS[section])}


def expected(hint: Any) -> str:
    """A type of the schema in words: `a whole number of at least 1, or "auto"`."""
    if get_origin(hint) in {Union, types.UnionType}:
        kinds = [part for part in get_args(hint) if part is not types.NoneType]
        return _either(map(expected, kinds), comma=", ")
    if get_origin(hint) is Literal:
        return _either(map(_show, get_args(hint)))
    if get_origin(hint) is not Annotated:
        return "a section of keys" if get_origin(hint) is dict else f"a {hint.__name__}"
    kind, *notes = get_args(hint)
    meta = next(note for note in notes if isinstance(note, msgspec.Meta))
    if kind is str:
        return "a string that is not empty"
    noun = {int: "a whole number", float: "a number"}[kind]
    return f"{noun} from {meta.ge} to {meta.le}" if meta.le else f"{noun} of at least {meta.ge}"


def _place_of(key: str, section: str, overridden: bool) -> str:
    """Where an unknown key may have been meant to be."""
    homes = [name for name in SECTIONS if key in field_types(name)]
    if homes and overridden:
        return f"did you mean {_either(f'{home}.{key}' for home in homes)}?"
    if homes:
        return f"it belongs in {_either(f'[{home}]' for home in homes)}"
    near = _nearest(key, field_types(section))
    if near:
        return f'did you mean "{near}"?'
    return f"[{section}] has {', '.join(field_types(section))}"


def _unknown_section(name: str, table: object) -> str:
    near = _nearest(name, (*SECTIONS, "nodes"))
    if near and isinstance(table, Mapping | list):
        meant = "[[nodes]]" if near == "nodes" else f"[{near}]"
        return f"[{name}]: unknown section; did you mean {meant}?"
    if not isinstance(table, Mapping | list):
        homes = [f"[{section}]" for section in SECTIONS if name in field_types(section)]
        remedy = f"put it in {_either(homes)}" if homes else "remove it"
        return f"{name}: stands outside any section; {remedy}"
    return f"[{name}]: unknown section; there are {', '.join(f'[{known}]' for known in SECTIONS)}"


def _nearest(word: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(plain(word.lower()), list(known), n=1)), None)


def _either(words: Iterable[str], comma: str = " ") -> str:
    *others, last = words
    return f"{', '.join(others)}{comma}or {last}" if others else last


def _show(value: object) -> str:
    """A value as TOML would have it, on one line and cut short."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        return plain(f'"{value}"' if isinstance(value, str) else str(value), 60)
    except (RecursionError, ValueError):  # deeper, or a number with more digits, than Python shows
        return "such a value"
