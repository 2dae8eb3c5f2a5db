"""The shared-memory transport: payload in memfd windows, announced by ZeroMQ doorbells."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.comm.doorbell import Kind
from engine.comm.endpoint import Endpoint
from engine.comm.primitives import Arrival, Peer, Work, WorkItem
from engine.comm.routing import RankDispatch
from engine.errors import RunError
from engine.topology.ranks import RankId


@dataclass
class _Flight:
    """A busy region: what was dispatched from it, and whether the answer is there."""

    answer: Arrival
    arrived: bool = False


class ShmAttentionEndpoint(Endpoint[_Flight]):
    """`engine.comm.primitives.AttentionEndpoint` over shared memory. Peers: every expert rank."""

    def is_free(self, expert: int, lane: int) -> bool:
        return (expert, lane) not in self._busy

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
        self._busy[expert, lane] = _Flight(Arrival(expert, batch, lane, layer, tile, n))
        self._ring(Kind.DISPATCH, expert, item)
        return True

    def combine_recv(self) -> list[Arrival]:
        arrivals = []
        for bell in self._take(Kind.COMBINE):
            arrival = Arrival(
                bell.sender.rank, bell.batch, bell.lane, bell.layer, bell.tile, bell.n
            )
            flight = self._busy.get((arrival.expert, arrival.lane))
            if flight is None or flight.answer != arrival or flight.arrived:
                raise RunError(f"{bell.sender} answered {self.me} what was not asked: {arrival}")
            flight.arrived = True
            arrivals.append(arrival)
        return arrivals

    def combine_add(self, arrival: Arrival, rows: Tensor, into: Tensor) -> None:
        flight = self._busy.get((arrival.expert, arrival.lane))
        if flight is None or flight.answer != arrival or not flight.arrived:
            raise ValueError(f"not waiting to be added: {arrival}")
        if rows.shape != (arrival.n,):
            raise ValueError(f"{arrival.n} rows arrived, to be added to {list(rows.shape)}")
        segment = self._windows[arrival.expert].region(arrival.lane).out[: arrival.n]
        into.index_add_(0, rows, segment.to(into.dtype))
        del self._busy[arrival.expert, arrival.lane]

    def warm_up(self, wait_s: float) -> list[RankId]:
        return self._warm_up(Kind.COMBINE, wait_s, rings=True)

    def reconnect(self, peer: Peer) -> list[Arrival]:
        lost = [flight.answer for flight in self._connect(peer)]
        self._ring(Kind.WARMUP, peer.id.rank)  # once: a new life knows who is there
        return lost


class ShmExpertEndpoint(Endpoint[WorkItem]):
    """`engine.comm.primitives.ExpertEndpoint` over shared memory. Peers: every attention rank."""

    def dispatch_recv(self) -> list[WorkItem]:
        items = []
        for bell in self._take(Kind.DISPATCH):
            rank, life = bell.sender.rank, bell.sender.incarnation
            key = (rank, bell.lane)
            if key in self._busy:
                raise RunError(f"{bell.sender} used lane {bell.lane} again before its combine")
            item = WorkItem(
                rank, bell.batch, bell.lane, bell.layer, bell.tile, bell.n, bell.p, life
            )
            self._busy[key] = item
            items.append(item)
        return items

    def is_current(self, item: WorkItem) -> bool:
        return self._busy.get((item.group, item.lane)) == item

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
            del self._busy[item.group, item.lane]
            self._ring(Kind.COMBINE, item.group, item)

    def warm_up(self, wait_s: float) -> list[RankId]:
        return self._warm_up(Kind.DISPATCH, wait_s, rings=False)

    def reconnect(self, peer: Peer) -> None:
        self._connect(peer)

    def _warmed(self, rank: int) -> None:
        self._ring(Kind.WARMUP, rank)
