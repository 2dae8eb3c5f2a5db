"""The expert rank's end: dispatches in, combines out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property

import torch

from engine.comm.channel import Region
from engine.comm.doorbell import Bell, Kind
from engine.comm.endpoint import Endpoint
from engine.comm.primitives import Peer, Work, WorkItem
from engine.comm.routing import Routing, merge
from engine.errors import RunError
from engine.topology.ranks import RankId


class ExpertSide(Endpoint[Bell]):
    """`engine.comm.primitives.ExpertEndpoint` over any transport. Peers: every attention rank."""

    @cached_property
    def _loose(self) -> dict[tuple[int, int], tuple[int, int]]:
        """By group and lane, the batch and layer of which something was sent again: its ranks may
        be at different tiles, or have their answers, so none is kept waiting for another.
        """
        return {}

    @property
    def due(self) -> float:
        return math.inf

    def dispatch_recv(self) -> list[WorkItem]:
        items = []
        for bell in self._take(Kind.DISPATCH, Kind.REPEAT):
            key = (bell.sender.rank, bell.lane)
            if key in self._busy:
                raise RunError(f"{bell.sender} used lane {bell.lane} again before its combine")
            self._busy[key] = bell
            items += self._items(bell.sender.rank // self._members, bell)
        return items

    def _items(self, group: int, came: Bell) -> list[WorkItem]:
        """What can be served in the lane of `came`, of what could not before."""
        if self._members == 1:
            return [_item(group, [came])]
        place = group, came.lane
        work = came.batch, came.layer
        if came.kind is Kind.REPEAT and self._loose.get(place) != work:
            self._loose[place] = work
            waiting = [bell for bell in self._bells(*place) if (bell.batch, bell.layer) == work]
            return [_item(group, [bell]) for bell in waiting]
        if self._loose.get(place) == work:
            return [_item(group, [came])]
        bells = self._bells(*place)
        if len(bells) < self._members:
            return []
        told = {(b.batch, b.layer, b.tile, b.sender.incarnation) for b in bells}
        if len(told) > 1:
            raise RunError(
                f"the ranks of attention group {group} disagree in lane {came.lane}: {told}"
            )
        return [_item(group, bells)]

    def _bells(self, group: int, lane: int) -> list[Bell]:
        """The dispatches that are here of a group's ranks, in their order."""
        ranks = range(group * self._members, (group + 1) * self._members)
        return [bell for rank in ranks if (bell := self._busy.get((rank, lane))) is not None]

    def holds(self, rank: int, lane: int) -> bool:
        """Whether a dispatch of that attention rank is here and not answered."""
        return (rank, lane) in self._busy

    def is_current(self, item: WorkItem) -> bool:
        bells = [self._busy.get((rank, item.lane)) for rank in item.ranks]
        there = [bell for bell in bells if bell is not None]
        return len(there) == len(bells) and _item(item.group, there) == item

    def open(self, item: WorkItem) -> Work:
        if not self.is_current(item):
            raise ValueError(f"not waiting to be served: {item}")
        regions = [self._region(rank, item.lane) for rank in item.ranks]
        if len(regions) == 1:
            (region,) = regions
            hidden, out = region.hidden, region.out
            routing = Routing(region.counts, region.row_index, region.weights)
        else:
            hidden = torch.cat([region.hidden for region in regions])
            out = torch.empty_like(hidden)
            routing = merge(
                [Routing(r.counts, r.row_index, r.weights) for r in regions],
                [len(r.hidden) for r in regions],
            )
        return Work(hidden, routing.counts, routing.row_index, routing.weights, out)

    def _region(self, rank: int, lane: int) -> Region:
        """Raises RunError when the routing points outside the region's own rows."""
        bell = self._busy[rank, lane]
        channel = self._channels[rank]
        channel.settle(lane)
        region = channel.region(lane, bell.n, bell.p)
        if not bell.n:  # no payload came; what lies there is older
            return dataclasses.replace(region, counts=torch.zeros_like(region.counts))
        if region.counts.device.type != "cpu":
            return region  # looking would make the host wait for the device
        good = int(region.counts.sum()) == bell.p and bool((region.counts >= 0).all())
        if good and bell.p:
            least, most = torch.aminmax(region.row_index)
            good = 0 <= int(least) <= int(most) < bell.n
        if not good:
            raise RunError(
                f"{bell.sender} sent {self.me} a routing table that does not fit its {bell.n} "
                f"rows and {bell.p} pairs: {bell}"
            )
        return region

    def combine_send(self, item: WorkItem, work: Work) -> None:
        if not self.is_current(item):
            return
        ranks = item.ranks
        bells = [self._busy[rank, item.lane] for rank in ranks]
        rows = work.out.split([bell.n for bell in bells])
        for rank, bell, mine in zip(ranks, bells, rows, strict=True):
            if len(ranks) > 1 and bell.n:
                self._channels[rank].region(item.lane, bell.n, bell.p).out.copy_(mine)
            # Before the bell: the answer to it may be the lane's next dispatch.
            del self._busy[rank, item.lane]
        for rank, bell in zip(ranks, bells, strict=True):
            self._ring(Kind.COMBINE, rank, _item(item.group, [bell]))

    def warm_up(self, wait_s: float) -> list[RankId]:
        return self._warm_up(Kind.DISPATCH, Kind.REPEAT, wait_s=wait_s, rings=False)

    def reconnect(self, peer: Peer) -> None:
        # What the others of its group had dispatched goes with their own new lives; none of the
        # new ones dispatches before all of them are known here.
        self._connect(peer)

    def _warmed(self, rank: int) -> None:
        self._ring(Kind.WARMUP, rank)


def _item(group: int, bells: Sequence[Bell]) -> WorkItem:
    first = bells[0]
    return WorkItem(
        group,
        first.batch,
        first.lane,
        first.layer,
        first.tile,
        sum(bell.n for bell in bells),
        sum(bell.p for bell in bells),
        first.sender.incarnation,
        tuple(bell.sender.rank for bell in bells),
    )
