"""The socket between a rank and its supervisor, over which it learns of peers' new lives."""

import os
import socket
from collections.abc import Iterator

import msgspec

from engine.comm.packets import receive_packet, send_packet
from engine.comm.primitives import Peer
from engine.worker.spec import PeerSpec

_decode = msgspec.msgpack.Decoder(PeerSpec).decode


def send_peer(link: socket.socket, peer: PeerSpec, window: int | None) -> None:
    """Supervisor's side. Raises OSError when the rank is gone or does not read any more."""
    send_packet(link, msgspec.msgpack.encode(peer), [] if window is None else [window])


class Lifeline:
    """The rank's side. Takes over `fd`; `fileno` is for a poller."""

    def __init__(self, fd: int) -> None:
        self._link = socket.socket(fileno=fd)
        self._link.setblocking(False)

    def fileno(self) -> int:
        return self._link.fileno()

    def receive(self) -> Iterator[Peer]:
        """The peers that were started again since. Each one's descriptor lasts until the next."""
        while True:
            try:
                packet = receive_packet(self._link)
            except BlockingIOError:
                return
            if packet is None:  # the supervisor is gone; the kernel is about to end this process
                return
            data, windows = packet
            spec = _decode(data)
            try:
                yield Peer(spec.id, spec.bell, spec.shape, next(iter(windows), None))
            finally:
                for window in windows:
                    os.close(window)
