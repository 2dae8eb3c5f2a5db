"""An attention and an expert rank's real endpoints in two processes, for measuring between them."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import zmq

from engine.comm.attention_side import AttentionSide
from engine.comm.channel import Region
from engine.comm.doorbell import Bell, Ear, Kind
from engine.comm.expert_side import ExpertSide
from engine.comm.layout import WindowShape
from engine.comm.primitives import Arrival, Peer, WorkItem
from engine.comm.routing import RankDispatch, plan_dispatch
from engine.comm.shm import ShmTransport
from engine.comm.windows import Window, create_windows
from engine.errors import RunError
from engine.topology.ranks import RankId

WAIT_S = 20
LAYERS = 2
_ATTENTION, _EXPERT = RankId("attention", 0), RankId("expert", 0)
_fork = multiprocessing.get_context("fork")


class StampedAttention(AttentionSide):
    """Notes when it rings, in monotonic nanoseconds: the payload is written, the bell is not."""

    rang_ns = 0

    def _ring(self, kind: Kind, rank: int, what: Arrival | WorkItem | None = None) -> Bell:
        self.rang_ns = time.monotonic_ns()
        return super()._ring(kind, rank, what)


class Place:
    """Where the two meet: a folder for their sockets, and one window of `shape`.

    opened_ns: when the expert rank opened the latest item, in monotonic nanoseconds. There
    computing would start.
    """

    def __init__(self, folder: Path, shape: WindowShape) -> None:
        self.shape = shape
        self.opened_ns = _fork.RawValue("q", 0)
        self._folder = folder
        self._fd = create_windows(shape.total_bytes)

    def attention(self) -> StampedAttention:
        transport = ShmTransport(torch.float32)
        ear, peers = Ear(self._address(_ATTENTION)), [self._peer(_EXPERT)]
        return StampedAttention(_ATTENTION, ear, peers, transport, torch.float32, LAYERS)

    def expert(self) -> ExpertSide:
        transport = ShmTransport(torch.float32)
        ear, peers = Ear(self._address(_EXPERT)), [self._peer(_ATTENTION)]
        return ExpertSide(_EXPERT, ear, peers, transport, torch.float32, LAYERS)

    def regions(self) -> list[Region]:
        """Of each lane, at full size."""
        window = Window(self._fd, self.shape, torch.float32)
        return [window.region(lane) for lane in range(self.shape.lanes)]

    def close(self) -> None:
        os.close(self._fd)

    def _peer(self, who: RankId) -> Peer:
        return Peer(who, self._address(who), self.shape, self._fd)

    def _address(self, who: RankId) -> str:
        return f"ipc://{self._folder}/{who.role}"


@contextmanager
def place(shape: WindowShape) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="asapctl-") as folder:
        made = Place(Path(folder), shape)
        try:
            yield made
        finally:
            made.close()


@contextmanager
def sender(shape: WindowShape, part: RankDispatch) -> Iterator[tuple[Sender, Place]]:
    """An attention rank here, whose only expert rank is another process."""
    with place(shape) as where, other_process(serve_forever, where):
        made = Sender(where, part)
        try:
            if made.endpoint.warm_up(WAIT_S):
                raise RunError("the expert rank did not answer")
            yield made, where
        finally:
            made.endpoint.close()


@contextmanager
def other_process(target: Callable[..., None], *args: Any) -> Iterator[None]:
    """Runs target(*args) in a process of one thread, and kills it at the end."""
    process = _fork.Process(target=_child, args=(target, *args), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _child(target: Callable[..., None], *args: Any) -> None:
    torch.set_num_threads(1)
    with torch.inference_mode():
        target(*args)


def random_part(tokens: int, experts: int, top_k: int, seed: int = 0) -> RankDispatch:
    """A dispatch of all `tokens` to one rank that holds all `experts`."""
    made = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=made).topk(top_k).indices
    weights = torch.rand(tokens, top_k, generator=made)
    (part,) = plan_dispatch(chosen, weights, [range(experts)])
    return part


def poller_of(endpoint: AttentionSide | ExpertSide) -> zmq.Poller:
    poller = zmq.Poller()
    for source in endpoint.sources:
        poller.register(source, zmq.POLLIN)
    return poller


class EmptyExpert:
    """An expert rank without experts: opens each item and answers with whatever lies in `out`."""

    def __init__(self, where: Place) -> None:
        self.endpoint = where.expert()
        self._opened = where.opened_ns
        self._poller = poller_of(self.endpoint)

    def serve(self) -> None:
        """Waits for something to come, and serves it."""
        while not (items := self.endpoint.dispatch_recv()):
            self._poller.poll()
        for item in items:
            work = self.endpoint.open(item)
            self._opened.value = time.monotonic_ns()
            self.endpoint.combine_send(item, work)


def serve_forever(where: Place) -> None:
    expert = EmptyExpert(where)
    while True:
        expert.serve()


class Sender:
    """The attention rank: one dispatch and its combine at a time."""

    def __init__(self, where: Place, part: RankDispatch) -> None:
        self.endpoint = where.attention()
        self._part = part
        self._poller = poller_of(self.endpoint)
        self._source = torch.randn(part.n, where.shape.hidden)
        self._into = torch.zeros(part.n, where.shape.hidden)
        self._lanes, self._sent = where.shape.lanes, 0
        self._regions = where.regions()

    def round_trip(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """A dispatch of the whole part, and the answer added. meanwhile: where the expert rank is
        in this process, it serves then.
        """
        lane = self._next_lane()
        self.endpoint.dispatch_send(0, lane, self._sent, 0, 0, self._source, self._part)
        meanwhile()
        while not (arrivals := self.endpoint.combine_recv()):
            if not self._poller.poll(WAIT_S * 1000):
                raise RunError(f"no answer came for {WAIT_S} s")
        self.endpoint.combine_add(arrivals[0], self._part.rows, self._into)

    def plain_copies(self) -> None:
        """The same bytes into the same window, and the rows out of it."""
        region = self._regions[self._next_lane()]
        region.hidden.copy_(self._source)
        region.counts.copy_(self._part.counts)
        region.row_index.copy_(self._part.row_index)
        region.weights.copy_(self._part.weights)
        self._into.copy_(region.out)

    def _next_lane(self) -> int:
        self._sent += 1
        return self._sent % self._lanes
