"""The environment of HCCL, NCCL and gloo: ports, interfaces, timeouts, buffers.

One plan for all ranks of a node, so that all have the same. What the user has set is kept, and
said. The limits are those of CANN's environment variable reference (HCCL) and of NCCL's; nothing
of it was run on an accelerator.
"""

import ipaddress
import math
import os
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from engine.echo import plain
from engine.errors import UsageError
from engine.launch.ports import (
    FIRST_PORT,
    LAST_PORT,
    ephemeral_ports,
    free_range,
    parse_ports,
    ports_in_use,
)

HCCL_BASE_PORTS = 32  # HCCL_IF_BASE_PORT takes so many from its value on; 16 before CANN 8.5
HCCL_LAST_BASE = 65504
HCCL_TIMEOUT_S = (120, 7200)
HCCL_DETERMINISTIC = ("true", "false", "strict")
# Of communicators for collectives, and of those that torch-npu makes for sends and receives. In
# MiB; what HCCL takes by itself is at most the following.
HCCL_BUFFERS = ("HCCL_BUFFSIZE", "P2P_HCCL_BUFFSIZE")
HCCL_BUFFER_MIB = 200
_MIB = 1 << 20

INTERFACES = {
    "gloo": "GLOO_SOCKET_IFNAME",
    "nccl": "NCCL_SOCKET_IFNAME",
    "hccl": "HCCL_SOCKET_IFNAME",
}
# What both ends of a communicator have to have alike.
AGREED = {
    "hccl": (
        "HCCL_CONNECT_TIMEOUT",
        *HCCL_BUFFERS,
        "HCCL_DETERMINISTIC",
        "HCCL_SOCKET_FAMILY",
    ),
    "nccl": ("NCCL_SOCKET_FAMILY", "NCCL_BUFFSIZE"),
}

# How fast a rank reads its weights in bad cases, such as a network file system that all ranks read
# from at once. Ranks come to their communicators that far apart.
_SLOW_LOAD = 100 * 10**6

# NCCL documents no figure. NVIDIA/nccl issue 964 measured 544 MB for a communicator of two A100,
# and issue 1685 about 470 MB for each peer of an H100, sending and receiving, in 32 channels that
# have a buffer of NCCL_BUFFSIZE and others. An estimate that meets the larger one.
_NCCL_CHANNELS = 32
_NCCL_CHANNEL_BYTES = 13 * _MIB
_NCCL_BUFFER_BYTES = 4 * _MIB


@dataclass
class _Environment:
    """What is planned, with the user's own values in place of it where there are some."""

    environ: Mapping[str, str]
    values: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def own(self, name: str) -> str | None:
        """The user's value of `name`, which is kept; None without one."""
        value = self.environ.get(name)
        if value is not None and name not in self.values:
            self.values[name] = value
            self.notes.append(f"{name}={plain(value)} is kept, as your environment has it")
        return value

    def plan(self, name: str, value: str) -> None:
        if self.own(name) is None:
            self.values[name] = value


def plan_environment(
    *,
    transport: str,
    collectives: str | None,
    ranks: int,
    window_bytes: int,
    connect_timeout_s: float = 300.0,
    load_bytes: int = 0,
    address: str | None = None,
    environ: Mapping[str, str] = os.environ,
    interfaces: Sequence[str] | None = None,
    addresses: Mapping[str, Sequence[str]] | None = None,
    ports: Collection[int] | None = None,
    ephemeral: range | None = None,
    seed: int | None = None,
) -> tuple[dict[str, str], list[str]]:
    """What to set in every rank's process, and sentences about it for the user.

    transport: "shm", "gloo", "nccl" or "hccl". collectives: the backend of tensor-parallel groups,
    None without any. ranks: processes on this node. window_bytes: the largest message.
    load_bytes: the most weights that one rank reads. address: with several nodes, this one's own
    address, whose interface ranks take; empty, where it is not known yet. environ: the user's. For
    tests: interfaces that are up and their addresses, ports in use, those that the system gives out
    itself, and where the search for free ones begins (of two instances that start at once, each
    should look elsewhere).

    Raises UsageError for a value of the user's that HCCL would refuse, without free ports, and for
    an address that no interface has.
    """
    backends = {transport, collectives} & INTERFACES.keys()
    plan = _Environment(environ)
    if not backends:
        return {}, []
    known: Collection[str] = up_interfaces() if interfaces is None else interfaces
    if address is None:
        interface = _interface(known)
    else:
        there = interface_addresses() if addresses is None else addresses
        known = {*known, *there}
        names = [name for backend, name in INTERFACES.items() if backend in backends]
        interface = _interface_of(address, there, names, environ) if address else None
    family = "AF_INET6" if address and ":" in address else None
    if "gloo" in backends:
        _plan_gloo(plan, interface, known)
    if "nccl" in backends:
        if plan.own("NCCL_SOCKET_IFNAME") is None and interface:
            plan.plan("NCCL_SOCKET_IFNAME", f"={interface}")
            if family:
                plan.plan("NCCL_SOCKET_FAMILY", family)
        # A device has this many queues for kernels. With fewer than there are streams, a send may
        # stand in a queue behind a receive that waits for the peer's send.
        plan.plan("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if "hccl" in backends:
        # An address of the user's goes before the interface.
        named = plan.own("HCCL_IF_IP") or plan.own("HCCL_SOCKET_IFNAME")
        if named is None and interface:
            plan.plan("HCCL_SOCKET_IFNAME", f"={interface}")
            if family:
                plan.plan("HCCL_SOCKET_FAMILY", family)
        _plan_hccl_ports(
            plan,
            ranks,
            ports_in_use() if ports is None else ports,
            ephemeral_ports() if ephemeral is None else ephemeral,
            os.getpid() if seed is None else seed,
        )
        _plan_hccl_timeout(plan, connect_timeout_s, load_bytes)
        _plan_hccl_buffers(plan, window_bytes)
        if collectives == "hccl":
            own = plan.own("HCCL_DETERMINISTIC")
            if own not in (None, *HCCL_DETERMINISTIC):
                raise UsageError(
                    f"HCCL_DETERMINISTIC={plain(own or '')}: must be "
                    f"{', '.join(HCCL_DETERMINISTIC[:-1])} or {HCCL_DETERMINISTIC[-1]}; or unset it"
                )
            plan.plan("HCCL_DETERMINISTIC", "true")
    return plan.values, plan.notes


def communicator_bytes(backend: str, environment: Mapping[str, str]) -> int:
    """Device memory that one communicator takes at each of its ends.

    hccl: twice its buffer size, as CANN documents. nccl: an estimate. Others take none.
    """
    if backend == "hccl":
        return 2 * max(_buffer_mib(environment, name) for name in HCCL_BUFFERS) * _MIB
    if backend == "nccl":
        buffer = _positive(environment, "NCCL_BUFFSIZE", _NCCL_BUFFER_BYTES)
        channels = min(
            _positive(environment, name, _NCCL_CHANNELS)
            for name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")
        )
        return min(channels, _NCCL_CHANNELS) * (_NCCL_CHANNEL_BYTES + buffer)
    return 0


def up_interfaces() -> list[str]:
    """Names of the network interfaces that are up."""
    return [name for name, state in psutil.net_if_stats().items() if state.isup]


def interface_addresses() -> dict[str, list[str]]:
    """The IP addresses of each network interface that is up."""
    found = psutil.net_if_addrs()
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [each.address for each in found.get(name, ()) if each.family in families]
        for name in up_interfaces()
    }


def agreed(environment: Mapping[str, str], backends: Collection[str]) -> dict[str, str]:
    """What of an environment has to be the same on all nodes, for some of "hccl" and "nccl"."""
    return {
        name: environment[name]
        for backend in sorted(backends)
        for name in AGREED.get(backend, ())
        if name in environment
    }


def _interface_of(
    address: str,
    addresses: Mapping[str, Sequence[str]],
    names: Sequence[str],
    environ: Mapping[str, str],
) -> str | None:
    """The interface that has the address; None where the user has named one. names: of the
    variables that it is for.
    """
    for name, own in addresses.items():
        if _ip(address) in map(_ip, own):
            return name
    missing = [name for name in names if not environ.get(name)]
    if not missing:
        return None
    raise UsageError(
        f"no network interface here has this node's address, {plain(address)}; set "
        f"{' and '.join(missing)} to the one that reaches the other nodes"
    )


def _ip(address: str) -> str:
    """One spelling of an address; of an IPv6 one without its interface."""
    bare = address.partition("%")[0]
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        return bare


def _interface(names: Collection[str]) -> str | None:
    """Where all ranks are on this node, what they say to each other needs no network."""
    if "lo" in names:
        return "lo"
    return min(names, default=None)


def _plan_gloo(plan: _Environment, interface: str | None, known: Collection[str]) -> None:
    own = plan.own("GLOO_SOCKET_IFNAME")
    if own is None and interface:
        plan.plan("GLOO_SOCKET_IFNAME", interface)
    elif own is not None and own not in known:
        plan.notes.append(f"GLOO_SOCKET_IFNAME={plain(own)}: no such interface is up here")


def _plan_hccl_ports(
    plan: _Environment, ranks: int, ports: Collection[int], ephemeral: range, seed: int
) -> None:
    """Ranges for the hosts' sockets and the devices' own. CANN takes the range before the base
    port, so a base port of the user's rules out a range of ours.
    """
    taken = set(ports)
    base = plan.own("HCCL_IF_BASE_PORT")
    host = plan.own("HCCL_HOST_SOCKET_PORT_RANGE")
    if base is not None:
        if not re.fullmatch("[0-9]{1,5}", base) or not FIRST_PORT <= int(base) <= HCCL_LAST_BASE:
            raise UsageError(
                f"HCCL_IF_BASE_PORT={plain(base)}: must be {FIRST_PORT} to {HCCL_LAST_BASE}, since "
                f"HCCL takes {HCCL_BASE_PORTS} ports from there on; unset it to have one chosen"
            )
        own = range(int(base), int(base) + HCCL_BASE_PORTS)
        if host is None:
            _say_in_use(plan, "HCCL_IF_BASE_PORT", [own], taken)
        taken.update(own)
    if host is not None:
        taken.update(_own_ports(plan, "HCCL_HOST_SOCKET_PORT_RANGE", host, taken))
    if base is None and host is None:
        # One a process at least; a rank that starts again may find its old one not yet free.
        chosen = free_range(max(HCCL_BASE_PORTS, 2 * ranks), taken, ephemeral, seed)
        plan.plan("HCCL_HOST_SOCKET_PORT_RANGE", f"{chosen.start}-{chosen.stop - 1}")
        plan.plan("HCCL_IF_BASE_PORT", str(chosen.start))  # for a CANN that has no ranges
        taken.update(chosen)
    npu = plan.own("HCCL_NPU_SOCKET_PORT_RANGE")
    if npu is not None:
        _own_ports(plan, "HCCL_NPU_SOCKET_PORT_RANGE", npu, ())
        return
    chosen = free_range(HCCL_BASE_PORTS, taken, ephemeral, seed)
    plan.plan("HCCL_NPU_SOCKET_PORT_RANGE", f"{chosen.start}-{chosen.stop - 1}")


def _own_ports(
    plan: _Environment, name: str, value: str, taken: Collection[int]
) -> Collection[int]:
    """The ports of a range that the user has set."""
    ranges = parse_ports(value)
    if ranges is None:
        raise UsageError(
            f"{name}={plain(value)}: not ports of 1 to {LAST_PORT}, as in 61000-61050 or "
            "61000,61050-61100, each once; correct it, or unset it to have a range chosen"
        )
    _say_in_use(plan, name, ranges, taken)
    return {port for ports in ranges for port in ports}


def _say_in_use(
    plan: _Environment, name: str, ranges: Sequence[range], taken: Collection[int]
) -> None:
    used = sorted(port for ports in ranges for port in ports if port in taken)
    if used:
        plan.notes.append(f"{name}: port {used[0]} is in use, so HCCL may fail to start; unset it")


def _plan_hccl_timeout(plan: _Environment, connect_timeout_s: float, load_bytes: int) -> None:
    least, most = HCCL_TIMEOUT_S
    own = plan.own("HCCL_CONNECT_TIMEOUT")
    if own is not None:
        if not re.fullmatch("[0-9]{1,5}", own) or not least <= int(own) <= most:
            raise UsageError(
                f"HCCL_CONNECT_TIMEOUT={plain(own)}: must be whole seconds of {least} to {most}; "
                "correct it, or unset it and use [comm] connect_timeout_s"
            )
        return
    skew = load_bytes / _SLOW_LOAD
    seconds = min(most, max(least, math.ceil(connect_timeout_s), math.ceil(skew)))
    plan.plan("HCCL_CONNECT_TIMEOUT", str(seconds))
    if seconds > math.ceil(connect_timeout_s):
        why = "HCCL takes no less" if seconds == least else "slow storage may take that long"
        plan.notes.append(f"ranks wait {seconds} s for each other's HCCL communicators: {why}")


def _plan_hccl_buffers(plan: _Environment, window_bytes: int) -> None:
    for name in HCCL_BUFFERS:
        if plan.own(name) is None:
            # CANN's advice is more than the data of one operation.
            plan.plan(name, str(window_bytes // _MIB + 1))
        mib = _buffer_mib(plan.values, name)
        if mib * _MIB < window_bytes:
            plan.notes.append(
                f"{name}={mib} is less than a message ({window_bytes / _MIB:.0f} MiB), which "
                "makes it slower"
            )


def _buffer_mib(environment: Mapping[str, str], name: str) -> int:
    return _positive(environment, name, HCCL_BUFFER_MIB)


def _positive(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name)
    if value is None:
        return default
    if not re.fullmatch("[0-9]{1,12}", value) or int(value) < 1:
        raise UsageError(f"{name}={plain(value)}: must be a whole number above 0; or unset it")
    return int(value)
