"""Node 0's connections to the agents of the other nodes: a thread that carries, beats and listens.

A thread, so that nodes hear of each other whatever the command is busy with.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import zmq

from engine.curve import Gatekeeper, Keys, secure_server
from engine.launch.orders import BEAT_S, Beat, EndNode, NodeLeaves, Order, decode, encode

log = logging.getLogger(__name__)

_LINGER_MS = 1000


class Said(NamedTuple):
    """An agent sent something; by `peer` it can be answered."""

    peer: bytes
    order: Order


class Silent(NamedTuple):
    """Nothing has been heard of the agent `peer` for `seconds`."""

    peer: bytes
    seconds: float


@dataclass
class _Peer:
    heard: float
    silent: bool = False


@dataclass
class _Shared:
    """What both threads touch."""

    events: deque[Said | Silent] = field(default_factory=deque)
    orders: deque[tuple[bytes, Order]] = field(default_factory=deque)
    ended: bool = False


class Switchboard:
    """fd: a socket that listens at `address` (tcp://...), which is taken over. keys: only who has
    them gets in. timeout_s: how long an agent may be silent.
    """

    def __init__(self, address: str, fd: int, keys: Keys, timeout_s: float) -> None:
        self._shared = _Shared()
        self._timeout_s = timeout_s
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gatekeeper = Gatekeeper(self._context, keys, log)
        socket = self._context.socket(zmq.ROUTER)
        socket.set_hwm(0)
        socket.linger = _LINGER_MS
        secure_server(socket, keys)
        self._gatekeeper.watch(socket)
        socket.set(zmq.USE_FD, fd)
        socket.bind(address)
        self._thread = threading.Thread(
            target=self._run, args=(socket,), name="switchboard", daemon=True
        )
        self._thread.start()

    def fileno(self) -> int:
        """Readable when `events` has something."""
        return self._news

    def events(self) -> list[Said | Silent]:
        """What has happened since, beats left out."""
        try:
            os.eventfd_read(self._news)
        except BlockingIOError:
            return []
        events = self._shared.events
        return [events.popleft() for _ in range(len(events))]

    def send(self, peer: bytes, order: Order) -> None:
        self._shared.orders.append((peer, order))
        os.eventfd_write(self._wake, 1)

    def close(self, reason: str | None) -> None:
        """Tells every agent that the launch is over; `reason`: of what it failed."""
        if not self._thread.is_alive():
            return
        self.send(b"", EndNode(reason))
        self._shared.ended = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._gatekeeper.close()
        self._context.term()
        os.close(self._news)
        os.close(self._wake)

    def _run(self, socket: zmq.Socket[bytes]) -> None:
        peers: dict[bytes, _Peer] = {}
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        beat_at = time.monotonic()
        while True:
            left = max(0.0, beat_at - time.monotonic())
            ready = dict(poller.poll(round(left * 1000)))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            while socket.poll(0):
                self._hear(peers, *socket.recv_multipart())
            orders = self._shared.orders
            for _ in range(len(orders)):
                peer, order = orders.popleft()
                for to in [peer] if peer else list(peers):
                    socket.send_multipart([to, encode(order)])
            if self._shared.ended:
                socket.close()
                return
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_S
                for peer in peers:
                    socket.send_multipart([peer, encode(Beat())])
                self._look(peers)

    def _hear(self, peers: dict[bytes, _Peer], peer: bytes, data: bytes) -> None:
        peers[peer] = _Peer(time.monotonic())
        try:
            order = decode(data)
        except msgspec.DecodeError as error:  # another version, which the hello would have told
            log.warning("a node sent what is no message: %s", error)
            return
        if isinstance(order, NodeLeaves):
            del peers[peer]
        if not isinstance(order, Beat):
            self._tell(Said(peer, order))

    def _look(self, peers: dict[bytes, _Peer]) -> None:
        now = time.monotonic()
        for name, peer in peers.items():
            if now - peer.heard > self._timeout_s and not peer.silent:
                peer.silent = True
                self._tell(Silent(name, now - peer.heard))

    def _tell(self, event: Said | Silent) -> None:
        self._shared.events.append(event)
        os.eventfd_write(self._news, 1)
