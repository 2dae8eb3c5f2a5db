"""The shared-memory transport: payload in memfd windows, announced by ZeroMQ doorbells."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import zmq
from torch import Tensor

from engine.comm.doorbell import Bell, BellBox, BellRinger, Kind
from engine.comm.primitives import Arrival, Peer, Work, WorkItem, by_rank
from engine.comm.routing import RankDispatch
from engine.comm.windows import Window
from engine.errors import RunError
from engine.topology.ranks import RankId

_RERING_S = 0.5


class _Endpoint:
    """What both ends have: a box to hear bells in, and a window and a ringer for each peer.

    me, address: this rank, and where it listens (`ipc:///...`, at most 107 bytes of path).
    dtype: the payload's. layers: a bell for a layer beyond is an error. context: shared with the
    caller's other sockets; by default one of its own. Build it after the last fork.
    """

    def __init__(
        self,
        me: RankId,
        address: str,
        peers: Sequence[Peer],
        dtype: torch.dtype,
        layers: int,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.me = me
        self._dtype = dtype
        self._layers = layers
        self._own_context = context is None
        self._context = context or zmq.Context()
        self._windows: dict[int, Window] = {}
        self._ringers: dict[int, BellRinger] = {}
        self._cold: set[int] = set()
        self._kept: list[Bell] = []  # came during warm_up and wait for the next drain
        self._box: BellBox | None = None
        try:
            self._box = BellBox(self._context, me, address)
            for peer in by_rank(peers).values():
                self._connect(peer)
        except BaseException:
            self.close()
            raise

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._open_box.socket

    @property
    def dropped(self) -> int:
        """Bells of lives that are over, dropped so far."""
        return self._open_box.dropped

    @property
    def _open_box(self) -> BellBox:
        if self._box is None:
            raise ValueError("the endpoint is closed")
        return self._box

    def _connect(self, peer: Peer) -> None:
        rank = peer.id.rank
        old = self._ringers.get(rank)
        if old is not None and peer.id.incarnation <= old.peer.incarnation:
            raise ValueError(f"{peer.id} is already in incarnation {old.peer.incarnation}")
        window = Window(peer.fd, peer.shape, self._dtype)
        if old is not None:
            old.close()
            self._windows[rank].close()
            self._kept = [bell for bell in self._kept if bell.sender.rank != rank]
        self._windows[rank] = window
        self._ringers[rank] = BellRinger(self._context, peer.id, peer.bell)
        self._open_box.expect([peer.id])
        self._cold.add(rank)

    def _ring(self, kind: Kind, rank: int, what: Arrival | WorkItem | None = None) -> None:
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

    def _take(self, kind: Kind) -> list[Bell]:
        """Bells of `kind` that came; warm-up bells are dealt with on the way."""
        bells, self._kept = self._kept, []
        for bell in self._open_box.drain():
            if bell.kind is Kind.WARMUP:
                self._warmed(bell.sender.rank)
            elif bell.kind is kind:
                self._check(bell)
                bells.append(bell)
            else:
                raise RunError(f"{bell.sender} rang {self.me} for a {bell.kind.name.lower()}")
        return bells

    def _check(self, bell: Bell) -> None:
        """A bell's numbers become offsets into shared memory: none may lead outside."""
        shape = self._windows[bell.sender.rank].shape
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
        self._cold.discard(rank)

    def _warm_up(self, kind: Kind, deadline_s: float, rings: bool) -> None:
        deadline = time.monotonic() + deadline_s
        next_ring = 0.0
        while self._cold:
            now = time.monotonic()
            if now >= deadline:
                names = ", ".join(str(self._ringers[rank].peer) for rank in sorted(self._cold))
                raise RunError(
                    f"{self.me} did not hear from {names} within {deadline_s:g} s; "
                    "look in the logs of those ranks"
                )
            if rings and now >= next_ring:
                # Again and again: a rank that has not been told of this life drops the bell.
                for rank in self._cold:
                    self._ring(Kind.WARMUP, rank)
                next_ring = now + _RERING_S
            wait_s = min(deadline, next_ring if rings else deadline) - now
            self.socket.poll(max(1, round(wait_s * 1000)))
            self._kept = self._take(kind)

    def close(self) -> None:
        """Drops what has not been delivered, and leaves no socket file. May be called twice."""
        for ringer in self._ringers.values():
            ringer.close()
        for window in self._windows.values():
            window.close()
        if self._box is not None:
            self._box.close()
            self._box = None
        if self._own_context:
            self._context.term()


@dataclass
class _Flight:
    """A busy region: what was dispatched from it, and whether the answer is there."""

    answer: Arrival
    arrived: bool = False


class ShmAttentionEndpoint(_Endpoint):
    """`engine.comm.primitives.AttentionEndpoint` over shared memory. Peers: every expert rank."""

    def __init__(
        self,
        me: RankId,
        address: str,
        peers: Sequence[Peer],
        dtype: torch.dtype,
        layers: int,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._flights: dict[tuple[int, int], _Flight] = {}
        super().__init__(me, address, peers, dtype, layers, context)

    def is_free(self, expert: int, lane: int) -> bool:
        return (expert, lane) not in self._flights

    def dispatch_send(
        self,
        expert: int,
        lane: int,
        batch: int,
        layer: int,
        tile: int,
        source: Tensor,
        part: RankDispatch,
    ) -> bool:
        if not self.is_free(expert, lane):
            return False
        window = self._windows[expert]
        shape = window.shape
        n, p = part.n, part.p
        if n > shape.rows or p > shape.pairs or part.counts.shape[0] != shape.local_experts:
            raise ValueError(
                f"{n} rows, {p} pairs of {part.counts.shape[0]} experts do not fit a window of "
                f"{shape.rows} rows, {shape.pairs} pairs, {shape.local_experts} experts"
            )
        if source.dtype != self._dtype or source.shape[1:] != (shape.hidden,):
            raise ValueError(
                f"rows are {source.dtype} {list(source.shape)}, "
                f"not {self._dtype} [N, {shape.hidden}]"
            )
        region = window.region(lane)
        torch.index_select(source, 0, part.rows, out=region.hidden[:n])
        region.counts.copy_(part.counts)
        region.row_index[:p].copy_(part.row_index)
        region.weights[:p].copy_(part.weights)
        item = WorkItem(self.me.rank, batch, lane, layer, tile, n, p, self.me.incarnation)
        self._flights[expert, lane] = _Flight(Arrival(expert, batch, lane, layer, tile, n))
        self._ring(Kind.DISPATCH, expert, item)
        return True

    def combine_recv(self) -> list[Arrival]:
        arrivals = []
        for bell in self._take(Kind.COMBINE):
            arrival = Arrival(
                bell.sender.rank, bell.batch, bell.lane, bell.layer, bell.tile, bell.n
            )
            flight = self._flights.get((arrival.expert, arrival.lane))
            if flight is None or flight.answer != arrival or flight.arrived:
                raise RunError(f"{bell.sender} answered {self.me} what was not asked: {arrival}")
            flight.arrived = True
            arrivals.append(arrival)
        return arrivals

    def combine_add(self, arrival: Arrival, rows: Tensor, into: Tensor) -> None:
        flight = self._flights.get((arrival.expert, arrival.lane))
        if flight is None or flight.answer != arrival or not flight.arrived:
            raise ValueError(f"not waiting to be added: {arrival}")
        if rows.shape != (arrival.n,):
            raise ValueError(f"{arrival.n} rows arrived, to be added to {list(rows.shape)}")
        segment = self._windows[arrival.expert].region(arrival.lane).out[: arrival.n]
        into.index_add_(0, rows, segment.to(into.dtype))
        del self._flights[arrival.expert, arrival.lane]

    def warm_up(self, deadline_s: float) -> None:
        self._warm_up(Kind.COMBINE, deadline_s, rings=True)

    def reconnect(self, peer: Peer) -> list[Arrival]:
        self._connect(peer)
        lost = [key for key in self._flights if key[0] == peer.id.rank]
        return [self._flights.pop(key).answer for key in sorted(lost)]


class ShmExpertEndpoint(_Endpoint):
    """`engine.comm.primitives.ExpertEndpoint` over shared memory. Peers: every attention rank."""

    def __init__(
        self,
        me: RankId,
        address: str,
        peers: Sequence[Peer],
        dtype: torch.dtype,
        layers: int,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._serving: dict[tuple[int, int], WorkItem] = {}
        super().__init__(me, address, peers, dtype, layers, context)

    def dispatch_recv(self) -> list[WorkItem]:
        items = []
        for bell in self._take(Kind.DISPATCH):
            rank, life = bell.sender.rank, bell.sender.incarnation
            key = (rank, bell.lane)
            if key in self._serving:
                raise RunError(f"{bell.sender} used lane {bell.lane} again before its combine")
            item = WorkItem(
                rank, bell.batch, bell.lane, bell.layer, bell.tile, bell.n, bell.p, life
            )
            self._serving[key] = item
            items.append(item)
        return items

    def is_current(self, item: WorkItem) -> bool:
        return self._serving.get((item.group, item.lane)) == item

    def open(self, item: WorkItem) -> Work:
        if not self.is_current(item):
            raise ValueError(f"not waiting to be served: {item}")
        region = self._windows[item.group].region(item.lane)
        work = Work(
            hidden=region.hidden[: item.n],
            counts=region.counts,
            row_index=region.row_index[: item.p],
            weights=region.weights[: item.p],
            out=region.out[: item.n],
        )
        good = int(work.counts.sum()) == item.p and bool((work.counts >= 0).all())
        if good and item.p:
            least, most = torch.aminmax(work.row_index)
            good = 0 <= int(least) <= int(most) < item.n
        if not good:
            raise RunError(
                f"attention {item.group} sent {self.me} a routing table that does not fit its "
                f"{item.n} rows and {item.p} pairs: {item}"
            )
        return work

    def combine_send(self, item: WorkItem) -> None:
        if self.is_current(item):
            # Before the bell: the answer to it may be the lane's next dispatch.
            del self._serving[item.group, item.lane]
            self._ring(Kind.COMBINE, item.group, item)

    def warm_up(self, deadline_s: float) -> None:
        self._warm_up(Kind.DISPATCH, deadline_s, rings=False)

    def reconnect(self, peer: Peer) -> None:
        self._connect(peer)
        self._serving = {
            key: item for key, item in self._serving.items() if item.group != peer.id.rank
        }

    def _warmed(self, rank: int) -> None:
        super()._warmed(rank)
        self._ring(Kind.WARMUP, rank)
