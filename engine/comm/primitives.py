"""The four primitives, as attention and expert ranks see them. Any transport implements these.

    attention rank                          expert rank
    dispatch_send  -- rows, routing -->     dispatch_recv, open
    combine_recv, combine_add  <-- rows --  combine_send

Each (attention rank, expert rank, lane) has one region. It is busy from dispatch_send until
combine_add: a dispatch carries the credit for its own combine, so combine_send never waits.

An attention group of T ranks deals its tokens out to them; every one of them dispatches to every
expert rank, n = 0 included, and the T dispatches are one work item, ready when all have come. Where
an expert rank has died in between, they may have different ones left to be answered: then each is
served by itself.

Nothing here blocks but warm_up, for as long as it is told. A loop drains (`combine_recv`,
`dispatch_recv`) until nothing more comes and only then polls `sources`: bells that came during
warm_up are handed out by the next drain and no longer make a source readable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.comm.layout import WindowShape
from engine.topology.ranks import RankId

if TYPE_CHECKING:
    import zmq
    from torch import Tensor

    from engine.comm.routing import RankDispatch


class Peer(msgspec.Struct, frozen=True):
    """The other end of a pair. bell: the ZeroMQ address where `id` listens.

    fd: the window that the two share, where the transport has such. It is mapped, not kept: the
    caller may close it once the endpoint has been constructed (or `reconnect` has returned).
    """

    id: RankId
    bell: str
    shape: WindowShape
    fd: int | None = None


class Arrival(msgspec.Struct, frozen=True):
    """A combine that can be added: `n` rows of `tile` from the expert rank `expert`."""

    expert: int
    batch: int
    lane: int
    layer: int
    tile: int
    n: int


class WorkItem(msgspec.Struct, frozen=True):
    """A dispatch that can be served: `n` rows and `p` (expert, row) pairs of `ranks` together, all
    ranks of attention group `group` or one of them.

    incarnation: which life of the group sent it.
    """

    group: int
    batch: int
    lane: int
    layer: int
    tile: int
    n: int
    p: int
    incarnation: int = 0
    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True, eq=False)
class Work:
    """The arrays of one work item, valid until its combine_send; views into the window when the
    group has one rank.

    hidden [n, H] payload; counts [local experts] int32; row_index [p] int32; weights [p] float32.
    out [n, H] payload: the result goes here. It holds an older result until it is written.
    """

    hidden: Tensor
    counts: Tensor
    row_index: Tensor
    weights: Tensor
    out: Tensor


class AttentionEndpoint(Protocol):
    @property
    def sources(self) -> list[zmq.Socket[bytes] | int]:
        """One of them is readable when combines came. Only for a poller."""

    def is_free(self, expert: int, lane: int) -> bool:
        """Whether dispatch_send to this region would go."""

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
        """Sends source[part.rows] and the routing; source is [N, H] of the payload's dtype.
        again: the expert rank died before it answered.

        False: the region is still busy and nothing was written. ValueError: it cannot fit.
        A part with n = 0 is announced and answered like any other; with one attention rank to a
        group, skip it and await nothing.
        """

    def combine_recv(self) -> list[Arrival]:
        """All combines that came since; empty when none did. RunError on a wrong one."""

    def combine_add(self, arrival: Arrival, rows: Tensor, into: Tensor) -> None:
        """into[rows] += the arrived rows, then frees the region. Once for each arrival.

        rows: `rows` of the RankDispatch that was sent. into [N, H] of any float dtype. Add a
        tile's arrivals in rank order: then bits do not depend on which came first.
        """

    @property
    def cold(self) -> list[RankId]:
        """The expert ranks that have not been heard of since they were connected, or to which no
        payload can pass yet.
        """

    def warm_up(self, wait_s: float) -> list[RankId]:
        """Rings every expert rank that has not answered yet and waits for the answers.

        Returns those that are still `cold` after `wait_s` seconds.
        """

    def reconnect(self, peer: Peer) -> list[Arrival]:
        """Switches to another life of an expert rank, with a new window.

        Returns the dispatches in flight to the old one, arrived or not: they are gone, and the
        caller sends them again. Bells of the old life are dropped from now on.
        """

    def close(self) -> None: ...


class ExpertEndpoint(Protocol):
    @property
    def sources(self) -> list[zmq.Socket[bytes] | int]:
        """One of them is readable when dispatches came. Only for a poller."""

    @property
    def due(self) -> float:
        """When (monotonic seconds) to look again although no source says so; usually never."""

    def dispatch_recv(self) -> list[WorkItem]:
        """All dispatches that came since; empty when none did. RunError on a wrong one."""

    def is_current(self, item: WorkItem) -> bool:
        """False when the item's sender was replaced (reconnect) since: discard the item."""

    def open(self, item: WorkItem) -> Work:
        """The item's arrays. RunError when its routing points outside its own rows."""

    def combine_send(self, item: WorkItem, work: Work) -> None:
        """Sends `work.out`. Once for each item; nothing happens when it is not current."""

    @property
    def cold(self) -> list[RankId]:
        """The attention ranks that have not rung since they were connected, or from which no
        payload can pass yet.
        """

    def warm_up(self, wait_s: float) -> list[RankId]:
        """Waits until every attention rank has rung, and answers. As AttentionEndpoint's.

        Answering is a part of dispatch_recv, so a rank that serves need not call this.
        """

    def reconnect(self, peer: Peer) -> None:
        """Switches to another life of an attention rank; items of the old one become void."""

    def close(self) -> None: ...


def by_rank(peers: Sequence[Peer]) -> dict[int, Peer]:
    """Raises ValueError when two peers have the same rank."""
    table = {peer.id.rank: peer for peer in peers}
    if len(table) != len(peers):
        raise ValueError("two peers have the same rank")
    return table
