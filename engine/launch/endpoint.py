"""HOST:PORT of node 0: written, read, and looked at before anybody binds it or connects to it.

Names are looked up forwards only, and addresses are used as written.
"""

import errno
import ipaddress
import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from engine.echo import plain
from engine.errors import UsageError

DEFAULT_PORT = 29400  # torchrun's
LOOPBACK_VARIABLE = "ASAPCTL_ALLOW_LOOPBACK"
_LOOK_S = 0.5


def endpoint(host: str, port: int | str) -> str:
    """HOST:PORT as --rdzv-endpoint takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_endpoint(text: str, where: str) -> tuple[str, int]:
    """Host, without brackets, and port. Raises UsageError, which names `where`."""
    shown = f"{where}: {plain(text) or 'empty'}"
    match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^\[\]:]+))(?::([0-9]{1,5}))?", text)
    if "://" in text:
        raise UsageError(f"{shown}: leave out what is before it, as in 10.0.0.1:{DEFAULT_PORT}")
    if text.count(":") > 1 and "[" not in text:
        raise UsageError(
            f"{shown}: put an IPv6 address in brackets, as in [fd00::1]:{DEFAULT_PORT}"
        )
    if match is None or re.search(r"[\s/@]", text):
        raise UsageError(f"{shown}: expected HOST:PORT, as in 10.0.0.1:{DEFAULT_PORT}")
    literal, name, digits = match.groups()
    if literal is not None:
        _check_literal(literal, shown)
    port = DEFAULT_PORT if digits is None else int(digits)
    if not 1 <= port <= 65535:
        raise UsageError(f"{shown}: the port has to be from 1 to 65535, the same on every node")
    return literal or name, port


def check_address(
    host: str,
    port: int,
    node_rank: int,
    environ: Mapping[str, str],
    on_note: Callable[[str], None],
    patience_s: float,
) -> None:
    """Raises UsageError for what other nodes cannot reach, and on node 0 for what is not its own.

    patience_s: how long a name that is not known is looked for.
    """
    where = f"--rdzv-endpoint {endpoint(host, port)}"
    for info in _resolve_patiently(host, port, where, on_note, patience_s):
        address = ipaddress.ip_address(str(info[4][0]).split("%")[0])
        named = "it" if str(address) == host else f"it means {address}, which"
        if address.is_unspecified:
            raise UsageError(
                f"{where}: {named} stands for every address, which nobody can connect to; give "
                "the one of node 0 that other nodes reach"
            )
        if address.is_loopback and environ.get(LOOPBACK_VARIABLE) != "1":
            raise UsageError(
                f"{where}: {named} is this machine's alone (loopback), so that other nodes would "
                "look for node 0 on themselves; give an address that they reach. To try several "
                f"nodes on one machine, set {LOOPBACK_VARIABLE}=1"
            )
        if node_rank == 0 and not _is_own(info):
            raise UsageError(
                f"{where}: {named} is no address of this machine, which is node 0; give one of "
                "node 0's own"
            )


def resolve(host: str, port: int, kind: int) -> list[Any]:
    """As `socket.getaddrinfo` has it; kind: of the socket. Raises OSError."""
    return socket.getaddrinfo(host, port, type=kind)


def _resolve_patiently(
    host: str, port: int, where: str, on_note: Callable[[str], None], patience_s: float
) -> list[Any]:
    deadline = time.monotonic() + patience_s
    waiting = False
    while True:
        try:
            return resolve(host, port, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "not a host name"
            if isinstance(error, UnicodeError) or time.monotonic() >= deadline:
                raise UsageError(
                    f"{where}: cannot resolve {plain(host)}: {reason}; give a name or an "
                    "address of node 0"
                ) from None
            if not waiting:
                on_note(f"{host} is not known here yet; looking for {patience_s:g} s")
                waiting = True
            time.sleep(_LOOK_S)


def _check_literal(literal: str, shown: str) -> None:
    try:
        ipaddress.IPv6Address(literal)  # with a zone, too, as in fe80::1%eth0
    except ValueError:
        raise UsageError(f"{shown}: {plain(literal)} is not an IPv6 address") from None


def _is_own(info: Any) -> bool:
    """Whether the address can be bound here."""
    family, kind, protocol, _, address = info
    with socket.socket(family, kind, protocol) as sock:
        try:
            sock.bind((address[0], 0, *address[2:]))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True
