"""What differs between transports: how the payload behind a doorbell gets from rank to rank.

Endpoints write into and read from regions and ring doorbells; a transport opens one channel for
each peer, and the channel brings the region's bytes across. Where that takes time, a notice says
that they have come.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.comm.layout import WindowShape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.comm.doorbell import Bell
    from engine.comm.primitives import Peer


@dataclass(frozen=True, eq=False)
class Region:
    """The arrays of one dispatch and of its answer, in the dtypes of `engine.comm.layout`.

    hidden [n, H]; counts [local experts]; row_index [p]; weights [p]; out [n, H].
    """

    hidden: Tensor
    counts: Tensor
    row_index: Tensor
    weights: Tensor
    out: Tensor


class Channel(Protocol):
    """The way to and from one life of one peer. Nothing here blocks."""

    @property
    def shape(self) -> WindowShape: ...

    @property
    def connected(self) -> bool:
        """Payload can pass. What is sent before waits."""

    def region(self, lane: int, n: int, p: int) -> Region:
        """The lane's arrays for a dispatch of `n` rows and `p` pairs: views, the same each time."""

    def send(self, bell: Bell) -> None:
        """Sends what was written for `bell`, once the bell has been rung."""

    def receive(self, bell: Bell) -> bool:
        """`bell` came from the peer. True: its payload is here; False: a notice will say so."""

    def settle(self, lane: int) -> None:
        """To be called before a received payload is used: what the device is given from now on
        runs after it has come.
        """

    def close(self) -> None: ...


class Notice(NamedTuple):
    """From a channel to its endpoint: the payload behind `bell` is here; without a bell, the
    channel is connected, or `error` says why it cannot be.
    """

    channel: Channel
    bell: Bell | None = None
    error: str | None = None


class Notices:
    """A queue that any thread may add to and a poller can wait for."""

    def __init__(self) -> None:
        self._queue: deque[Notice] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event

    def add(self, notice: Notice) -> None:
        self._queue.append(notice)
        if self._event >= 0:
            os.eventfd_write(self._event, 1)

    def drain(self) -> list[Notice]:
        """Every notice so far, without waiting."""
        try:
            os.eventfd_read(self._event)  # before the queue: what is added later rings again
        except BlockingIOError:
            return []
        return [self._queue.popleft() for _ in range(len(self._queue))]

    def close(self) -> None:
        event, self._event = self._event, -1
        if event >= 0:
            os.close(event)


class Transport(Protocol):
    """Opens channels. notices: where they report, None when payload never takes time. memory: where
    the payload lies.
    """

    @property
    def memory(self) -> torch.device: ...

    @property
    def notices(self) -> Notices | None: ...

    def open(self, peer: Peer) -> Channel:
        """A channel to that life of a peer; it may take a while to connect."""

    def close(self) -> None: ...
