"""The tables of `asapctl check`."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from engine.launch.budget import RankPlan, show_bytes, show_device_bytes
from engine.topology.ranks import RankId

if TYPE_CHECKING:
    from engine.launch.plan import Plan

_HEADINGS = {
    "working set": "working\nset",
    "KV caches": "KV",
    "communicators": "links",
    "gathered KV": "KV\ngathered",
}


def rank_table(ranks: Sequence[RankPlan], elsewhere: Mapping[RankId, int] | None = None) -> Table:
    """A row a rank. What lies on a device is in 10^9 bytes, and only that is in the total then; a
    part that no rank has is left out. elsewhere: the nodes of ranks that are not on this one.
    """
    elsewhere = elsewhere or {}
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    table.add_column("rank", no_wrap=True)
    table.add_column("on", no_wrap=True)
    table.add_column("experts", no_wrap=True)
    rows = [_parts(rank) for rank in ranks]
    parts = [part for part in rows[0] if any(row[part] for row in rows)]
    for part in parts:
        table.add_column(_HEADINGS.get(part, part), justify="right", no_wrap=True)
    for rank, row in zip(ranks, rows, strict=True):
        sizes = [_size(rank, part, row[part]) if row[part] else "-" for part in parts]
        place = f"node {elsewhere[rank.id]}" if rank.id in elsewhere else rank.place
        table.add_row(str(rank.id), place, _experts(rank.experts), *sizes)
    return table


def homes_of(plan: "Plan") -> dict[RankId, int]:
    """The node of each rank of an instance: of the first one that is on this node."""
    instance = plan.here[0][0]
    return {rank.id: plan.placement.node_of(instance, rank.id) for rank in plan.ranks}


def elsewhere(plan: "Plan") -> dict[RankId, int]:
    """The same, without this node's own."""
    return {id_: node for id_, node in homes_of(plan).items() if node != plan.node_rank}


def node_lines(plan: "Plan") -> list[tuple[str, str]]:
    """Labels and texts about instances and nodes; none of one instance on one node."""
    lines = []
    here = plan.placement.instances_of(plan.node_rank)
    if plan.instances > 1:
        text = f"{plan.instances}, of {len(plan.ranks)} ranks each"
        if len(here) < plan.instances:
            whole = len(plan.here) == len(here) * len(plan.ranks)
            noun = "instance" if len(here) == 1 else "instances"
            text += f"; {noun} {spans(here)} on this node" + ("" if whole else ", in part")
        lines.append(("instances", text))
    if plan.nnodes > 1:
        roles = [
            f"{role} {spans([rank.id.rank for _, rank in ranks])}"
            for role, ranks in groupby(
                [each for each in plan.here if each[0] == here[0]], lambda each: each[1].id.role
            )
        ]
        lines.append(
            ("nodes", f"{plan.nnodes}; this is node {plan.node_rank}, with {', '.join(roles)}")
        )
    if plan.instances > 1 and any(rank.device for _, rank in plan.here):
        lines += [("devices", text) for text in _devices_of_instances(plan)]
    return lines


def _devices_of_instances(plan: "Plan") -> list[str]:
    found: dict[tuple[int, str], list[str]] = {}
    for instance, rank in plan.here:
        if rank.device is not None:
            found.setdefault((instance, rank.device.kind), []).append(rank.device.visible)
    return [
        f"instance {instance} on {kind} "
        + (spans(list(map(int, names))) if all(map(str.isdigit, names)) else ", ".join(names))
        for (instance, kind), names in found.items()
    ]


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers, for people: `0-3, 6`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def device_lines(plan: "Plan") -> list[str]:
    """For each side on devices, what its fullest rank takes of one."""
    lines = []
    for role in ("attention", "expert"):
        limit = plan.limits.device(role)
        if limit is None:
            continue
        ranks = [rank for _, rank in plan.here if rank.id.role == role]
        if not ranks:
            continue
        rank = max(ranks, key=lambda rank: rank.device_bytes)
        lines.append(
            f"{len(ranks)} for {role} ranks: {rank.id} needs {show_device_bytes(rank.device_bytes)}"
            f" of {show_device_bytes(limit)}, {show_device_bytes(rank.driver_bytes)} of it an "
            "estimate of what the driver takes"
        )
    return lines


def _parts(rank: RankPlan) -> dict[str, int]:
    """The driver's part is the same on all, and told below the table."""
    parts = {part: size for part, size in rank.parts.items() if part != "driver"}
    return parts | {"total": rank.device_bytes or rank.total}


def _size(rank: RankPlan, part: str, size: int) -> str:
    on_device = part in rank.on_device or (part == "total" and rank.on_device)
    return show_device_bytes(size) if on_device else show_bytes(size)


def _experts(experts: range) -> str:
    if len(experts) < 2:
        return f"{experts.start} (1)" if experts else "-"
    return f"{experts.start}-{experts.stop - 1} ({len(experts)})"
