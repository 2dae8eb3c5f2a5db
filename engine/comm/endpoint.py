"""What the two ends of a pair have in common: bells, channels, and the meeting at the start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
import zmq

from engine.comm.channel import Channel, Transport
from engine.comm.doorbell import Bell, BellBox, BellRinger, Ear, Kind
from engine.comm.primitives import Arrival, Peer, WorkItem, by_rank
from engine.errors import RunError
from engine.topology.ranks import RankId

_RERING_S = 0.05

Use = TypeVar("Use")


class Endpoint(Generic[Use]):
    """A box to hear bells in; for each peer a channel, a ringer, and what each lane is in use for.

    me, ear: this rank, and where it listens (`ipc:///...`, at most 107 bytes of path, or tcp).
    transport: how payload travels; closed along with the endpoint. dtype: the payload's. layers: a
    bell for a layer beyond is an error. members: ranks to an attention group. context: shared with
    the caller's other sockets; by default one of its own. Build it after the last fork.
    """

    def __init__(
        self,
        me: RankId,
        ear: Ear,
        peers: Sequence[Peer],
        transport: Transport,
        dtype: torch.dtype,
        layers: int,
        members: int = 1,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.me = me
        self._keys = ear.keys
        self._dtype = dtype
        self._layers = layers
        self._members = members
        self._transport = transport
        self._own_context = context is None
        self._context = context or zmq.Context()
        self._channels: dict[int, Channel] = {}
        self._ringers: dict[int, BellRinger] = {}
        self._unheard: set[int] = set()
        self._busy: dict[tuple[int, int], Use] = {}  # by peer's rank and lane
        self._kept: list[Bell] = []  # came during warm_up and wait for the next drain
        self._box: BellBox | None = None
        try:
            self._box = BellBox(self._context, me, ear)
            for peer in by_rank(peers).values():
                self._connect(peer)
        except BaseException:
            self.close()
            raise

    @property
    def sources(self) -> list[zmq.Socket[bytes] | int]:
        notices = self._transport.notices
        return [self._open_box.socket, *([] if notices is None else [notices.fileno()])]

    @property
    def dropped(self) -> int:
        """Bells of lives that are over, dropped so far."""
        return self._open_box.dropped

    @property
    def _open_box(self) -> BellBox:
        if self._box is None:
            raise ValueError("the endpoint is closed")
        return self._box

    def _connect(self, peer: Peer) -> list[Use]:
        """Also replaces an earlier life of the peer; returns what its lanes were in use for."""
        rank = peer.id.rank
        old = self._ringers.get(rank)
        if old is not None and peer.id.incarnation <= old.peer.incarnation:
            raise ValueError(f"{peer.id} is already in incarnation {old.peer.incarnation}")
        channel = self._transport.open(peer)
        if old is not None:
            old.close()
            self._channels[rank].close()
            self._kept = [bell for bell in self._kept if bell.sender.rank != rank]
        self._channels[rank] = channel
        self._ringers[rank] = BellRinger(self._context, peer.id, peer.bell, self._keys)
        self._open_box.expect([peer.id])
        self._unheard.add(rank)
        return [self._busy.pop(key) for key in sorted(self._busy) if key[0] == rank]

    def _ring(self, kind: Kind, rank: int, what: Arrival | WorkItem | None = None) -> Bell:
        """Rings, and sends the payload that the bell announces."""
        ringer = self._ringers[rank]
        bell = Bell(kind, self.me, ringer.peer.incarnation)
        if what is not None:
            p = what.p if isinstance(what, WorkItem) else 0
            bell = Bell(
                kind,
                self.me,
                ringer.peer.incarnation,
                *(what.batch, what.lane, what.layer, what.tile, what.n, p),
            )
        ringer.ring(bell)
        if bell.n:
            self._channels[rank].send(bell)
        return bell

    def _take(self, *kinds: Kind) -> list[Bell]:
        """Bells of `kinds` whose payload is here; whatever else came is dealt with on the way."""
        bells, self._kept = self._kept, []
        for bell in self._open_box.drain():
            rank = bell.sender.rank
            self._unheard.discard(rank)
            if bell.kind is Kind.WARMUP:
                self._warmed(rank)
            elif bell.kind not in kinds:
                raise RunError(f"{bell.sender} rang {self.me} for a {bell.kind.name.lower()}")
            else:
                self._check(bell)
                if not bell.n or self._channels[rank].receive(bell):
                    bells.append(bell)
        return bells + self._landed()

    def _landed(self) -> list[Bell]:
        """Bells that came earlier and whose payload is here now."""
        notices = self._transport.notices
        bells: list[Bell] = []
        for channel, bell, error in [] if notices is None else notices.drain():
            if channel not in self._channels.values():
                continue  # of a life that is over
            if error is not None:
                raise RunError(error)
            if bell is not None:
                bells.append(bell)
        return bells

    def _check(self, bell: Bell) -> None:
        """A bell's numbers become offsets into shared memory: none may lead outside."""
        shape = self._channels[bell.sender.rank].shape
        limits = {
            "lane": (bell.lane, shape.lanes - 1),
            "layer": (bell.layer, self._layers - 1),
            "n": (bell.n, shape.rows),
            "p": (bell.p, bell.n * min(shape.top_k, shape.local_experts)),
        }
        for name, (value, most) in limits.items():
            if value > most:
                raise RunError(
                    f"{bell.sender} sent {self.me} {name} {value} where at most {most} is possible "
                    f"(batch {bell.batch}, lane {bell.lane}, layer {bell.layer}, tile {bell.tile})"
                )

    def _warmed(self, rank: int) -> None:
        """A warm-up bell came from the peer `rank`."""

    @property
    def cold(self) -> list[RankId]:
        """The peers that have not been heard of, or to which no payload can pass yet."""
        cold = self._unheard | {r for r, channel in self._channels.items() if not channel.connected}
        return [self._ringers[rank].peer for rank in sorted(cold)]

    def _warm_up(self, *kinds: Kind, wait_s: float, rings: bool) -> list[RankId]:
        deadline = time.monotonic() + wait_s
        next_ring = 0.0
        poller = zmq.Poller()
        for source in self.sources:
            poller.register(source, zmq.POLLIN)
        while self.cold:
            now = time.monotonic()
            if rings and now >= next_ring:
                # Again and again: a rank that has not been told of this life drops the bell.
                for rank in self._unheard:
                    self._ring(Kind.WARMUP, rank)
                next_ring = now + _RERING_S
            left_s = min(deadline, next_ring if rings else deadline) - now
            poller.poll(max(1, round(left_s * 1000)))
            self._kept = self._take(*kinds)
            if now >= deadline:
                break
        return self.cold

    def close(self) -> None:
        """Drops what has not been delivered, and leaves no socket file. May be called twice."""
        for ringer in self._ringers.values():
            ringer.close()
        for channel in self._channels.values():
            channel.close()
        self._transport.close()
        if self._box is not None:
            self._box.close()
            self._box = None
        if self._own_context:
            self._context.term()
