"""TCP ports: which are in use, which the system gives out itself, and ranges that are free."""

import itertools
import re
from collections.abc import Collection
from pathlib import Path

from engine.errors import UsageError

FIRST_PORT, LAST_PORT = 1024, 65535


def ports_in_use(root: Path = Path("/")) -> frozenset[int]:
    """Local TCP ports that somebody has, in whatever state."""
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = (root / "proc/net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            address = re.match(r"\s*\d+: [0-9A-F]+:([0-9A-F]{4}) ", line)
            if address:
                found.add(int(address.group(1), 16))
    return frozenset(found)


def ephemeral_ports(root: Path = Path("/")) -> range:
    """The ports that the system gives to whoever asks for any."""
    try:
        first, last = map(int, (root / "proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        first, last = 32768, 60999  # Linux's default
    return range(first, last + 1)


def parse_ports(value: str) -> list[range] | None:
    """The ranges in a value of HCCL_HOST_SOCKET_PORT_RANGE, such as "60000,60050-60100"; None: not
    one. "auto" has none.
    """
    if value == "auto":
        return []
    found = []
    for part in value.split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        if not match:
            return None
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        if not 1 <= first <= last <= LAST_PORT:
            return None
        found.append(range(first, last + 1))
    ordered = sorted(found, key=lambda ports: ports.start)
    apart = all(one.stop <= two.start for one, two in itertools.pairwise(ordered))
    return found if apart else None


def free_range(count: int, taken: Collection[int], ephemeral: range, seed: int) -> range:
    """`count` ports in a row that nobody has: outside of what the system gives out where there is
    room, since it may give those to anybody before HCCL takes them.
    """
    outside = [
        range(max(FIRST_PORT, ephemeral.stop), LAST_PORT + 1),
        range(16384, min(ephemeral.start, LAST_PORT + 1)),
    ]
    for area in (*outside, range(FIRST_PORT, LAST_PORT + 1)):
        places = len(area) - count + 1
        if places < 1:
            continue
        first = seed * count % places
        start = _search(area, count, taken, first, places)
        if start is None:
            start = _search(area, count, taken, 0, first)
        if start is not None:
            return range(start, start + count)
    raise UsageError(
        f"no {count} TCP ports in a row are free, which HCCL needs; end what holds them (ss -tan), "
        "or set HCCL_HOST_SOCKET_PORT_RANGE=auto and HCCL_NPU_SOCKET_PORT_RANGE=auto"
    )


def _search(area: range, count: int, taken: Collection[int], begin: int, end: int) -> int | None:
    """The first of `area`'s places begin..end - 1 from which `count` ports are free."""
    place = begin
    while place < end:
        start = area[place]
        used = [port for port in range(start, start + count) if port in taken]
        if not used:
            return start
        place += used[-1] - start + 1
    return None
