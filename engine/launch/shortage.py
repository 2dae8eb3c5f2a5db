"""What to say when memory is short: how much is needed, of what, and what would help."""

from collections.abc import Callable

from engine.launch.budget import Layout, Limits, RankPlan, show_bytes, show_device_bytes
from engine.topology.ranks import Role
from engine.topology.schema import MOST_PEERS, Topology

Rebuild = Callable[[int], Layout]


def host_shortage(
    topology: Topology, layout: Layout, longest: int, limits: Limits, whose: str, dtype: str
) -> str:
    """All ranks of this node need more of its memory than there is. whose: Machine's word."""
    on_host: dict[str, int] = {}
    for _, rank in layout.here(longest):
        for part, size in _host_parts(rank).items():
            on_host[part] = on_host.get(part, 0) + size
    on_host["processes"] = on_host.get("processes", 0) + layout.base_bytes
    remedies = {
        "weights": "take a smaller model"
        + (", dtype bfloat16" if dtype == "float32" else "")
        + (" or fewer attention groups" if layout.groups > 1 else ""),
        "windows": "lower [comm] window_tokens or [schedule] lanes",
        "attention's working sets": "lower [schedule] max_batch_tokens or lanes",
        "experts' working sets": "lower [comm] window_tokens",
        "KV caches": "lower [schedule] max_batch_tokens or lanes, or do not export the caches",
        "communicators": "lower [attention] groups or [experts] ranks, or take shm",
        "processes": "lower [attention] groups or [experts] ranks, or free some memory",
    }
    largest = max(remedies, key=lambda part: on_host.get(part, 0))
    remedy = remedies[largest]
    if layout.instances_here > 1:
        remedy += ", or lower [instances] count"
    listed = ", ".join(
        f"{part} {show_bytes(on_host[part])}" for part in remedies if on_host.get(part)
    )
    return (
        f"{topology.source}: needs {show_bytes(layout.host_bytes(longest))} of memory and "
        f"{whose} has {show_bytes(limits.host)} free ({listed}); {remedy}"
    )


def device_shortages(
    topology: Topology, layout: Layout, longest: int, limits: Limits, rebuild: Rebuild
) -> list[str]:
    """For each side whose fullest rank needs more than a device has. rebuild: the same layout with
    another number of expert ranks, wherever they are.
    """
    found = []
    for role in ("attention", "expert"):
        limit = limits.device(role)
        rank = fullest(layout, role, longest)
        if limit is None or rank is None or rank.device_bytes <= limit:
            continue
        section = "attention" if role == "attention" else "experts"
        noun = "an attention rank" if role == "attention" else "an expert rank"
        parts = {part: size for part, size in rank.parts.items() if size and part in rank.on_device}
        listed = ", ".join(f"{part} {show_device_bytes(size)}" for part, size in parts.items())
        holds = f"{len(rank.experts)} experts a layer: " if rank.experts else ""
        found.append(
            f"{topology.source}: [{section}] {noun} needs {show_device_bytes(rank.device_bytes)} "
            f"of its {layout.wiring.kind(role)} device, which has {show_device_bytes(limit)} "
            f"({holds}{listed}); {_device_remedy(role, parts, layout, longest, limits, rebuild)}"
        )
    return found


def fullest(layout: Layout, role: Role, longest: int) -> RankPlan | None:
    """The rank of `role` that needs most of its device; None: there are none on this node."""
    ranks = [rank for _, rank in layout.here(longest) if rank.id.role == role]
    return max(ranks, key=lambda rank: rank.device_bytes, default=None)


def fullest_bytes(layout: Layout, role: Role, longest: int) -> int:
    """What that rank needs of its device."""
    rank = fullest(layout, role, longest)
    return 0 if rank is None else rank.device_bytes


def _host_parts(rank: RankPlan) -> dict[str, int]:
    """By the names of `host_shortage`'s remedies."""
    side = "attention's" if rank.id.role == "attention" else "experts'"
    names = {"working set": f"{side} working sets", "process": "processes"}
    names["gathered KV"] = "KV caches"
    found: dict[str, int] = {}
    for part, size in rank.parts.items():
        if part not in rank.on_device:
            name = names.get(part, part)
            found[name] = found.get(name, 0) + size
    return found


def _device_remedy(
    role: Role,
    parts: dict[str, int],
    layout: Layout,
    longest: int,
    limits: Limits,
    rebuild: Rebuild,
) -> str:
    largest = max(parts, key=lambda part: parts[part])
    remedies = {
        "windows": "lower [comm] window_tokens or [schedule] lanes",
        "communicators": "lower the buffers of communicators (HCCL_BUFFSIZE, NCCL_BUFFSIZE) or the "
        "ranks",
    }
    if role == "expert":
        remedies["working set"] = "lower [comm] window_tokens"
    if largest in remedies:
        return remedies[largest]
    if role == "expert":
        most = min(layout.config.experts, MOST_PEERS)
        enough = range(len(layout.experts) + 1, most + 1)
        limit = limits.device(role)
        for ranks in enough:
            if limit is not None and fullest_bytes(rebuild(ranks), role, longest) <= limit:
                return f"with [experts] ranks = {ranks} it would fit"
        return "take devices with more memory, or a smaller model"
    if largest == "weights":
        return "raise [attention] tensor_parallel, or take devices with more memory"
    return "lower [schedule] max_batch_tokens, exclusive_tokens or lanes, or do not export caches"
