"""Cores, memory, limits, shared memory, interfaces and ports."""

import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from engine.doctor.facts import Fact, Section, in_units, section
from engine.errors import UsageError
from engine.launch.accelerators import count_nodes
from engine.launch.fabric import plan_environment
from engine.launch.machine import read_machine
from engine.launch.ports import ephemeral_ports, ports_in_use

_LIMITS = {
    # name: (what of, fewer than this is too few, why)
    "open files": (resource.RLIMIT_NOFILE, 1024, "ulimit -n 65536"),
    "processes": (resource.RLIMIT_NPROC, 512, "ulimit -u 4096"),
}
_LEAST_SHM = 1 << 30


def read_host(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Section:
    return section(
        "host",
        [
            ("cores", lambda: _machine(root)),
            ("limits", _limits),
            ("memfd", _memfd),
            ("/dev/shm", lambda: _shm(root)),
            ("interfaces", _interfaces),
            ("ports", lambda: _ports(environ, root)),
        ],
    )


def _machine(root: Path) -> Iterator[Fact]:
    machine = read_machine(root)
    yield Fact("cores", "ok", f"{machine.cores} that may be used", machine.cores)
    total = psutil.virtual_memory().total
    text = f"{in_units(machine.memory_bytes)} free of {in_units(total)}"
    if machine.memory_limit != "this machine":
        text = f"{in_units(machine.memory_bytes)} free in {machine.memory_limit}"
    yield Fact(
        "memory",
        "ok",
        text,
        {"free_bytes": machine.memory_bytes, "total_bytes": total, "limit": machine.memory_limit},
    )


def _limits() -> Iterator[Fact]:
    for name, (limit, least, remedy) in _LIMITS.items():
        soft, hard = resource.getrlimit(limit)
        low = soft != resource.RLIM_INFINITY and soft < least
        yield Fact(
            name,
            "problem" if low else "ok",
            f"{_shown(soft)} (may be raised to {_shown(hard)})",
            {"soft": _number(soft), "hard": _number(hard)},
            f"raise the limit: {remedy}" if low else None,
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else in_units(soft)
    yield Fact("locked memory", "ok", text, _number(soft))


def _number(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _memfd() -> Iterator[Fact]:
    """What transport shm shares memory with; a sandbox may forbid it."""
    try:
        os.close(os.memfd_create("asapctl-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        yield Fact(
            "memfd",
            "problem",
            f"memfd_create fails: {error.strerror}",
            False,
            "let the sandbox allow memfd_create, or use transport gloo",
        )
    else:
        yield Fact("memfd", "ok", "works; transport shm needs nothing else", True)


def _shm(root: Path) -> Iterator[Fact]:
    """asapctl's windows are not there, but NCCL's are, between GPUs without a direct way."""
    try:
        free = shutil.disk_usage(root / "dev/shm").free
    except OSError as error:
        yield Fact("/dev/shm", "absent", f"{error.strerror}; only NCCL uses it")
        return
    low = free < _LEAST_SHM and count_nodes("cuda", root) > 0
    yield Fact(
        "/dev/shm",
        "problem" if low else "ok",
        f"{in_units(free)} free; only NCCL uses it",
        free,
        "give the container more, as NCCL may need it (docker run --shm-size=8g)" if low else None,
    )


def _interfaces() -> Iterator[Fact]:
    states, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    found = {
        name: [
            entry.address for entry in addresses.get(name, []) if entry.family.name != "AF_PACKET"
        ]
        for name, state in states.items()
        if state.isup
    }
    text = "; ".join(" ".join([name, *own[:1]]) for name, own in found.items()) or "none is up"
    loopback = "lo" in found
    yield Fact(
        "interfaces",
        "ok" if loopback else "problem",
        text,
        found,
        None if loopback else "bring the loopback interface up (ip link set lo up)",
    )


def _ports(environ: Mapping[str, str], root: Path) -> Iterator[Fact]:
    used, system = ports_in_use(root), ephemeral_ports(root)
    yield Fact(
        "ports",
        "ok",
        f"{len(used)} in use; the system gives out {system.start} to {system.stop - 1}",
        {"in_use": len(used), "ephemeral": [system.start, system.stop - 1]},
    )
    try:
        planned, notes = plan_environment(
            transport="hccl",
            collectives=None,
            ranks=16,
            window_bytes=0,
            environ=environ,
            ports=used,
            ephemeral=system,
        )
    except UsageError as error:
        variable = str(error).partition("=")[0]
        yield Fact("HCCL ports", "problem", str(error), remedy=f"correct or unset {variable}")
        return
    ports = planned.get("HCCL_HOST_SOCKET_PORT_RANGE") or planned["HCCL_IF_BASE_PORT"]
    kept = [note for note in notes if "PORT" in note]
    text = f"{ports} would be taken for one node of 16 devices"
    yield Fact("HCCL ports", "ok", "; ".join([text, *kept]), ports)
