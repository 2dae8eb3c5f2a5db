"""Packets with file descriptors between local processes (SOCK_SEQPACKET and SCM_RIGHTS)."""

import array
import socket
from collections.abc import Sequence

# Linux passes at most 253 descriptors in one message.
MAX_FDS = 253
_MAX_PACKET = 1 << 17
_SIZE = array.array("i").itemsize


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends; what one sends the other receives whole, in order."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_packet(link: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Raises OSError when the other end is gone (BlockingIOError: it does not read)."""
    rights = array.array("i", fds)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if fds else []
    link.sendmsg([data], ancillary)


def receive_packet(link: socket.socket) -> tuple[bytes, list[int]] | None:
    """The next packet and its descriptors, now this process's own; None when the link is closed.

    BlockingIOError when the socket does not block and nothing has come.
    """
    size = socket.CMSG_SPACE(MAX_FDS * _SIZE)
    try:
        received = link.recvmsg(_MAX_PACKET, size)
    except ConnectionError:
        # The other end closed with packets of ours unread. That is reported before what it sent.
        received = link.recvmsg(_MAX_PACKET, size)
    data, ancillary, _, _ = received
    if not data:
        return None
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % _SIZE])
    return data, list(fds)
