"""The attention rank's end: dispatches out, combines in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.comm.doorbell import Kind
from engine.comm.endpoint import Endpoint
from engine.comm.primitives import Arrival, Peer, WorkItem
from engine.comm.routing import RankDispatch
from engine.errors import RunError
from engine.topology.ranks import RankId


@dataclass
class _Flight:
    """A busy region: what was dispatched from it, and whether the answer is there."""

    sent: WorkItem
    answer: Arrival
    arrived: bool = False


class AttentionSide(Endpoint[_Flight]):
    """`engine.comm.primitives.AttentionEndpoint` over any transport. Peers: every expert rank."""

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
        again: bool = False,
    ) -> bool:
        if not self.is_free(expert, lane):
            return False
        channel = self._channels[expert]
        shape = channel.shape
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
        region = channel.region(lane, n, p)
        rows = part.rows.to(source.device)
        if region.hidden.device == source.device:
            torch.index_select(source, 0, rows, out=region.hidden)
        else:
            region.hidden.copy_(source.index_select(0, rows))
        region.counts.copy_(part.counts)
        region.row_index.copy_(part.row_index)
        region.weights.copy_(part.weights)
        group = self.me.rank // self._members
        life = self.me.incarnation
        item = WorkItem(group, batch, lane, layer, tile, n, p, life, (self.me.rank,))
        answer = Arrival(expert, batch, lane, layer, tile, n)
        self._busy[expert, lane] = _Flight(item, answer)
        self._ring(Kind.REPEAT if again else Kind.DISPATCH, expert, item)
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
        channel = self._channels[arrival.expert]
        channel.settle(arrival.lane)
        region = channel.region(arrival.lane, flight.sent.n, flight.sent.p)
        into.index_add_(0, rows.to(into.device), region.out.to(into.device, into.dtype))
        del self._busy[arrival.expert, arrival.lane]

    def warm_up(self, wait_s: float) -> list[RankId]:
        return self._warm_up(Kind.COMBINE, wait_s=wait_s, rings=True)

    def reconnect(self, peer: Peer) -> list[Arrival]:
        lost = [flight.answer for flight in self._connect(peer)]
        self._ring(Kind.WARMUP, peer.id.rank)  # once: a new life knows who is there
        return lost
