"""The tables of `asapctl check`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from engine.launch.budget import RankPlan, show_bytes, show_device_bytes

if TYPE_CHECKING:
    from engine.launch.plan import Plan

_HEADINGS = {
    "working set": "working\nset",
    "KV caches": "KV",
    "communicators": "links",
    "gathered KV": "KV\ngathered",
}


def rank_table(ranks: Sequence[RankPlan]) -> Table:
    """A row a rank. What lies on a device is in 10^9 bytes, and only that is in the total then; a
    part that no rank has is left out.
    """
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
        table.add_row(str(rank.id), device_name(rank), _experts(rank.experts), *sizes)
    return table


def device_lines(plan: "Plan") -> list[str]:
    """For each side on devices, what its fullest rank takes of one."""
    lines = []
    for role in ("attention", "expert"):
        limit = plan.limits.device(role)
        if limit is None:
            continue
        ranks = [rank for rank in plan.ranks if rank.id.role == role]
        rank = max(ranks, key=lambda rank: rank.device_bytes)
        lines.append(
            f"{len(ranks)} for {role} ranks: {rank.id} needs {show_device_bytes(rank.device_bytes)}"
            f" of {show_device_bytes(limit)}, {show_device_bytes(rank.driver_bytes)} of it an "
            "estimate of what the driver takes"
        )
    return lines


def device_name(rank: RankPlan) -> str:
    """ "cpu", or the device as a mask names it: "npu 3"."""
    return "cpu" if rank.device is None else f"{rank.device.kind} {rank.device.visible}"


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
