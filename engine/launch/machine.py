"""What this process may use of the machine: cores and memory, control groups included."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Machine:
    """cores: what may run at the same time. memory_bytes: what is free to take.

    memory_limit: whose limit the memory is, for messages ("this machine", "its control group").
    """

    cores: int
    memory_bytes: int
    memory_limit: str = "this machine"


def read_machine(root: Path = Path("/")) -> Machine:
    """root: where /proc and /sys lie."""
    cores = len(os.sched_getaffinity(0))
    memory = int(psutil.virtual_memory().available)
    limit = "this machine"
    for group in _control_groups(root):
        quota = _cpu_quota(group)
        if quota is not None:
            cores = min(cores, max(1, int(quota)))
        free = _free_memory(group)
        if free is not None and free < memory:
            memory, limit = free, "its control group"
    return Machine(cores, memory, limit)


def _control_groups(root: Path) -> Iterator[Path]:
    """The folders of every control group that holds this process, of both versions."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers:
            hierarchies = [mounts / name for name in (controllers, *controllers.split(","))]
        else:
            hierarchies = [mounts, mounts / "unified"]
        # In a container the path may be the host's, and its own group is the root it sees.
        parts = Path(path.lstrip("/")).parts
        for hierarchy in dict.fromkeys(hierarchies):
            for depth in range(len(parts), -1, -1):
                yield hierarchy.joinpath(*parts[:depth])


def _cpu_quota(group: Path) -> float | None:
    """Cores' worth of time that the group may use, None without a limit or a cpu controller."""
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if not quota:
        quota = _read(group / "cpu.cfs_quota_us")
        period = _read(group / "cpu.cfs_period_us")
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None  # "max", or -1
    return int(quota) / int(period)


def _free_memory(group: Path) -> int | None:
    """Limit less use. The page cache that nobody reads is not in use: it goes when needed."""
    for limit_file, used_file, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _read(group / limit_file), _read(group / used_file)
        if limit.isdecimal() and used.isdecimal():
            stat = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines())
            return max(0, int(limit) - int(used) + int(stat.get(cache_key, 0)))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
