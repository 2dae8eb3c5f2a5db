"""The process-group transport: payload point to point over gloo, NCCL or HCCL.

NCCL and HCCL cannot receive from anyone, ignore tags and want sends and receives in matched order.
So each pair of ranks has a communicator of its own for either direction, and the doorbell says
what to receive. With one communicator for both directions a pair would deadlock: each side queues
its send before the receive that the other one waits for.

A message is one contiguous run of bytes. The thread of a link waits for its communicator; the
rank's own loop never does.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from engine.comm.channel import Notice, Notices, Region
from engine.comm.doorbell import Bell, Kind
from engine.comm.layout import WindowShape
from engine.comm.link import Link
from engine.comm.primitives import Peer
from engine.device.base import Device
from engine.device.cpu import Cpu
from engine.topology.ranks import RankId

# A rank may be in a long step when it is to hear that a peer has died and lives again.
_PATIENCE_S = 20.0

# Every backend has these; bytes are not converted on the way.
BYTES = torch.int8


class Meeting(Protocol):
    """Where ranks tell each other how to reach them."""

    @property
    def timeout(self) -> timedelta:
        """How long they wait for each other; the same for all."""

    def store(self, *lives: RankId) -> Store:
        """A new store for the communicator of these lives, for the calling thread."""


class ProcessGroupTransport:
    """me: this rank. carrier: the device whose backend carries the payload and in whose memory it
    lies; the CPU for gloo. overlap: links have streams of their own.
    """

    def __init__(
        self,
        me: RankId,
        dtype: torch.dtype,
        meeting: Meeting,
        carrier: Device | None = None,
        overlap: bool = True,
    ) -> None:
        self.notices = Notices()
        self._me = me
        self._dtype = dtype
        self._meeting = meeting
        self._carrier = carrier or Cpu()
        self._overlap = overlap
        # NCCL and HCCL build one communicator at a time: all ranks in the same order, else they
        # wait for each other in a circle. gloo may build all at once, and must: a rank that died
        # meanwhile holds up nobody but who wants to talk to it.
        self._last: Link | None = None

    @property
    def memory(self) -> torch.device:
        return self._carrier.torch

    def open(self, peer: Peer) -> ProcessGroupChannel:
        attention, expert = (
            (self._me, peer.id) if self._me.role == "attention" else (peer.id, self._me)
        )
        ways = ((attention, expert), (expert, attention))
        links = [self._link(*way) for way in ways]
        forth, back = links
        mine = (forth, back) if self._me.role == "attention" else (back, forth)
        channel = ProcessGroupChannel(
            peer.shape, self._dtype, self._carrier, *mine, self.notices, str(peer.id)
        )
        for link in links:
            link.start(channel.report)
        return channel

    def _link(self, sender: RankId, receiver: RankId) -> Link:
        def connect() -> Any:
            store = self._meeting.store(sender, receiver)
            return self._carrier.process_group(store, int(not sends), 2, self._meeting.timeout)

        sends = sender == self._me
        # An expert rank launches ahead: it need know nothing of the payload to do so. An attention
        # rank does not, since an expert rank announces what it has yet to compute: a receive would
        # hold the device up for as long.
        ahead = self._me.role == "expert"
        name = f"{sender} to {receiver}"
        recovers = self._carrier.backend == "gloo"
        patience_s = _PATIENCE_S if recovers else 0.0
        link = Link(name, connect, sends, self._carrier, self._overlap, ahead, patience_s)
        if not recovers:
            link.after, self._last = self._last, link
        return link

    def close(self) -> None:
        self.notices.close()


class ProcessGroupChannel:
    """For each lane, the bytes of a dispatch and of its answer, in the carrier's memory."""

    def __init__(
        self,
        shape: WindowShape,
        dtype: torch.dtype,
        carrier: Device,
        sending: Link,
        receiving: Link,
        notices: Notices,
        peer: str,
    ) -> None:
        self.shape = shape
        self._dtype = dtype
        self._carrier = carrier
        self._sending, self._receiving = sending, receiving
        self._notices = notices
        self._peer = peer
        largest = shape.message(shape.rows, shape.pairs).total
        self._dispatches = _lanes(shape.lanes, largest, carrier.torch)
        self._answers = _lanes(shape.lanes, shape.rows_bytes, carrier.torch)
        self._received: dict[int, Any] = {}  # by lane: the event after which its payload is here

    @property
    def connected(self) -> bool:
        return self._sending.connected and self._receiving.connected

    def region(self, lane: int, n: int, p: int) -> Region:
        shape, message = self.shape, self._dispatches[lane]
        at = shape.message(n, p)

        def view(begin: int, count: int, dtype: torch.dtype) -> Tensor:
            return message[begin : begin + count * dtype.itemsize].view(dtype)

        return Region(
            hidden=view(0, n * shape.hidden, self._dtype).view(n, shape.hidden),
            counts=view(at.counts_at, shape.local_experts, torch.int32),
            row_index=view(at.row_index_at, p, torch.int32),
            weights=view(at.weights_at, p, torch.float32),
            out=self._answer(lane, n).view(self._dtype).view(n, shape.hidden),
        )

    def send(self, bell: Bell) -> None:
        self._sending.put(self._bytes(bell))

    def receive(self, bell: Bell) -> bool:
        self._receiving.put(self._bytes(bell), bell)
        return False

    def settle(self, lane: int) -> None:
        self._carrier.wait_event(self._received.pop(lane, None))

    def report(self, bell: Bell | None, event: Any, error: str | None) -> None:
        """From a link's thread: it is connected, it has received, or it cannot."""
        if bell is not None:
            self._received[bell.lane] = event
        self._notices.add(Notice(self, bell, error and f"{self._peer}: {error}"))

    def close(self) -> None:
        self._sending.close()
        self._receiving.close()

    def _bytes(self, bell: Bell) -> Tensor:
        if bell.kind is Kind.COMBINE:
            return self._answer(bell.lane, bell.n)
        return self._dispatches[bell.lane][: self.shape.message(bell.n, bell.p).total]

    def _answer(self, lane: int, n: int) -> Tensor:
        size = n * self.shape.hidden * self.shape.payload_bytes
        return self._answers[lane][:size]


def _lanes(lanes: int, size: int, device: torch.device) -> list[Tensor]:
    return [torch.empty(size, dtype=BYTES, device=device) for _ in range(lanes)]
