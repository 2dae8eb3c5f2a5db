"""The expert rank's end with links that take their time, as a table has it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

import torch
import zmq

from engine.comm.channel import Transport
from engine.comm.doorbell import Ear
from engine.comm.expert_side import ExpertSide
from engine.comm.primitives import Peer, Work, WorkItem
from engine.hardware.table import Link, Links
from engine.paced.pacer import sleep_until
from engine.topology.ranks import RankId

_POLL_S = 0.001  # what zmq's poll counts in; the rest of a wait is slept


class PacedExpertSide(ExpertSide):
    """Both ways' times are spent at this end, and neither keeps anybody from working meanwhile: a
    dispatch is handed out, and a combine sent, once its time is over.

    tokens_a_pair: see `engine.paced.experts`.
    """

    def __init__(
        self,
        me: RankId,
        ear: Ear,
        peers: Sequence[Peer],
        transport: Transport,
        dtype: torch.dtype,
        layers: int,
        members: int,
        context: zmq.Context[zmq.Socket[bytes]],
        links: Links,
        tokens_a_pair: float,
    ) -> None:
        self._links = links
        self._tokens_a_pair = tokens_a_pair
        self._under_way: list[tuple[float, Callable[[], None]]] = []  # by the time of arrival
        self._here: list[WorkItem] = []
        super().__init__(me, ear, peers, transport, dtype, layers, members, context)
        self._poller = zmq.Poller()
        for source in self.sources:
            self._poller.register(source, zmq.POLLIN)

    @property
    def due(self) -> float:
        """When the next message arrives, in monotonic seconds, and a little before."""
        return min((at for at, _ in self._under_way), default=math.inf) - _POLL_S

    def dispatch_recv(self) -> list[WorkItem]:
        self._look()
        here = list(self._here)
        self._here.clear()
        return here

    def combine_send(self, item: WorkItem, work: Work) -> None:
        self._start(self._links.combine, item, partial(super().combine_send, item, work))

    def until(self, end: float) -> None:
        """Lets time pass up to the (monotonic) time `end`; what is under way goes on."""
        while True:
            self._look()
            now = time.monotonic()
            if end - now <= _POLL_S:
                break
            left = min(self.due, end - _POLL_S) - now
            if left > 0:
                self._poller.poll(max(1, math.floor(left * 1000)))
        sleep_until(end)

    def _look(self) -> None:
        """Notes what has been sent, and lets arrive what is due."""
        for item in super().dispatch_recv():
            self._start(self._links.dispatch, item, partial(self._here.append, item))
        while self.due <= time.monotonic():
            first = min(self._under_way, key=itemgetter(0))
            self._under_way.remove(first)
            at, arrive = first
            sleep_until(at)
            arrive()

    def _start(self, link: Link, item: WorkItem, arrive: Callable[[], None]) -> None:
        """Sends a message of `item` on its way. Those of several ranks travel side by side, so the
        longest counts.
        """
        if not self.is_current(item):
            return
        pairs = max(self._busy[rank, item.lane].p for rank in item.ranks)
        seconds = link.seconds(pairs * self._tokens_a_pair)
        self._under_way.append((time.monotonic() + seconds, arrive))
