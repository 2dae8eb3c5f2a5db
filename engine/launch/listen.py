"""The socket that an instance serves HTTP on: bound before anything is started, and then held."""

import ipaddress
import os
import socket
from collections.abc import Iterable
from typing import Any

from engine.errors import UsageError
from engine.topology.schema import Topology

API_KEY_VARIABLE = "ASAPCTL_API_KEY"
_BACKLOG = 4096


def api_key(topology: Topology) -> str | None:
    """What clients must send: the environment's key, or the topology's; None lets everybody in."""
    return os.environ.get(API_KEY_VARIABLE) or topology.serve.api_key


def host_problem(topology: Topology) -> str | None:
    """Why the topology's host may not be served on, if it may not."""
    host = topology.serve.host
    where = topology.where("serve", "host")
    try:
        addresses = _resolve(host, 0)
    except OSError as error:
        return f"{where}: cannot resolve {host}: {error.strerror}; give an address of this machine"
    if api_key(topology) is None and not _all_loopback(info[4][0] for info in addresses):
        return (
            f"{where}: others can reach {host}, so an API key is needed; set {API_KEY_VARIABLE} "
            "or [serve] api_key, or serve on 127.0.0.1"
        )
    return None


def open_listener(topology: Topology) -> socket.socket:
    """A socket that listens at the topology's host and port; port 0 takes any that is free.

    Who connects before the server has started is served when it has. Raises UsageError when the
    port is taken, or the host needs a key.
    """
    if problem := host_problem(topology):
        raise UsageError(problem)
    host, port = topology.serve.host, topology.serve.port
    family, kind, protocol, _, address = _resolve(host, port)[0]
    sock = socket.socket(family, kind, protocol)
    # Connections of an earlier server that linger do not keep its port; servers do.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise UsageError(
            f"{topology.where('serve', 'port')}: cannot serve on {host} port {port}: "
            f"{error.strerror}; choose another with --port (0: any that is free)"
        ) from None
    return sock


def url_of(sock: socket.socket) -> str:
    """Where clients on this machine reach `sock`: an address that means "all" is none to go to."""
    host, port = sock.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _resolve(host: str, port: int) -> list[Any]:
    """What `host` means, IPv4 first; it may be in brackets. Never asks for a host's name."""
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return sorted(found, key=lambda info: info[0] != socket.AF_INET)


def _all_loopback(addresses: Iterable[str]) -> bool:
    return all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses)
