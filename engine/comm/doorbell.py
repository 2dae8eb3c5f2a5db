"""Doorbells: a few bytes that say "it is written", and what it is.

A bell goes through ZeroMQ and so through system calls, after the payload's last write and before
its first read; that orders the two ranks' memory accesses, which a flag polled in the window
would not.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import msgspec
import zmq

from engine.curve import Gatekeeper, Keys, secure_client, secure_server
from engine.errors import RunError
from engine.topology.ranks import RankId, Role

_MAGIC = 0xA5B1  # changes whenever the fields do
_FORMAT = struct.Struct("<HBBIIIIIIIIQ")
_ROLES: tuple[Role, ...] = ("attention", "expert")
_RECONNECT_MS = 10


class Kind(IntEnum):
    DISPATCH = 1
    COMBINE = 2
    WARMUP = 3  # from an attention rank: are you there? from an expert rank: I am
    REPEAT = 4  # a dispatch again, which the expert rank's last life did not answer


class Bell(msgspec.Struct, frozen=True):
    """One doorbell. `receiver` is the incarnation that it is meant for; n rows, p pairs."""

    kind: Kind
    sender: RankId
    receiver: int
    batch: int = 0
    lane: int = 0
    layer: int = 0
    tile: int = 0
    n: int = 0
    p: int = 0

    def pack(self) -> bytes:
        return _FORMAT.pack(
            _MAGIC,
            self.kind,
            _ROLES.index(self.sender.role),
            self.sender.rank,
            self.sender.incarnation,
            self.receiver,
            self.lane,
            self.layer,
            self.tile,
            self.n,
            self.p,
            self.batch,
        )

    @staticmethod
    def unpack(data: bytes) -> "Bell":
        """RunError when `data` is not a bell of this version."""
        if len(data) != _FORMAT.size:
            raise RunError(f"a doorbell has {len(data)} bytes, not {_FORMAT.size}")
        magic, kind, role, rank, life, receiver, lane, layer, tile, n, p, batch = _FORMAT.unpack(
            data
        )
        if magic != _MAGIC or kind not in iter(Kind) or role >= len(_ROLES):
            raise RunError("a doorbell of another version: all ranks must run the same asapctl")
        sender = RankId(_ROLES[role], rank, life)
        return Bell(Kind(kind), sender, receiver, batch, lane, layer, tile, n, p)


@dataclass(frozen=True)
class Ear:
    """Where a rank listens. fd: a socket that is bound there already, and is taken over.

    keys: only who has them is heard; gatekeeper: of the same context, logs who is not.
    """

    address: str
    fd: int | None = None
    keys: Keys | None = None
    gatekeeper: Gatekeeper | None = None


class BellBox:
    """Where one rank hears its bells. `socket` is for a poller.

    Bells for another incarnation of this rank, or from another than the current incarnation of
    their sender, are dropped and counted in `dropped`.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], me: RankId, ear: Ear) -> None:
        self.dropped = 0
        self._me = me
        self._address = ear.address
        self._lives: dict[tuple[Role, int], int] = {}
        self.socket = context.socket(zmq.PULL)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVHWM, 0)
        secure_server(self.socket, ear.keys)
        if ear.gatekeeper is not None:
            ear.gatekeeper.watch(self.socket)
        if ear.fd is not None:
            self.socket.set(zmq.USE_FD, ear.fd)
        try:
            self.socket.bind(ear.address)
        except zmq.ZMQError as error:
            self.socket.close()
            raise RunError(f"{me} cannot listen at {ear.address}: {error.strerror}") from error

    def expect(self, peers: Iterable[RankId]) -> None:
        """Hear these from now on; each replaces an earlier life of the same rank."""
        for peer in peers:
            self._lives[peer.role, peer.rank] = peer.incarnation

    def drain(self) -> list[Bell]:
        """Every bell that has come, without waiting."""
        bells: list[Bell] = []
        while True:
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return bells
            bell = Bell.unpack(data)
            life = self._lives.get((bell.sender.role, bell.sender.rank))
            if bell.receiver == self._me.incarnation and bell.sender.incarnation == life:
                bells.append(bell)
            else:
                self.dropped += 1

    def close(self) -> None:
        """Leaves no socket file behind. The context must be terminated after this."""
        self.socket.close()
        if self._address.startswith("ipc://"):
            Path(self._address.removeprefix("ipc://")).unlink(missing_ok=True)


class BellRinger:
    """Rings one peer. Never blocks: bells queue up while the peer is not there (yet)."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        peer: RankId,
        address: str,
        keys: Keys | None = None,
    ) -> None:
        self.peer = peer
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        secure_client(self._socket, keys)
        self._socket.connect(address)

    def ring(self, bell: Bell) -> None:
        self._socket.send(bell.pack(), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
