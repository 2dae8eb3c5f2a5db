"""Attention and expert endpoints over real windows or process groups, and real ipc sockets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import zmq
from torch.distributed import FileStore

from engine.comm.attention_side import AttentionSide
from engine.comm.channel import Transport
from engine.comm.doorbell import Ear
from engine.comm.expert_side import ExpertSide
from engine.comm.layout import WindowShape
from engine.comm.primitives import Arrival, Peer, WorkItem
from engine.comm.process_group import ProcessGroupTransport
from engine.comm.shm import ShmTransport
from engine.comm.windows import create_windows
from engine.control.meeting import communicator_name
from engine.topology.ranks import RankId
from helpers.hccl_double import NpuDouble

WAIT_MS = 20_000  # a test that waits this long has failed


class FileMeeting:
    """Ranks of one machine meet in a folder."""

    timeout = timedelta(seconds=20)

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def store(self, *lives: RankId) -> FileStore:
        store = FileStore(str(self._folder / communicator_name(*lives)), -1)
        store.set_timeout(self.timeout)
        return store


class Pairs:
    """Windows between `groups` attention ranks and `len(experts)` expert ranks.

    experts: local experts of each expert rank. members: attention ranks to each of `groups`; the
    methods want the number of an attention rank. transport: "shm", "gloo", or "hccl", which is a
    stand-in (`helpers.hccl_double`). Endpoints made by `attention` and `expert` are closed by
    `close`; make them in the process that uses them.
    """

    def __init__(
        self,
        folder: Path,
        groups: int = 1,
        experts: Sequence[int] = (2,),
        dtype: torch.dtype = torch.float32,
        rows: int = 8,
        hidden: int = 4,
        top_k: int = 2,
        lanes: int = 2,
        layers: int = 4,
        transport: str = "shm",
        members: int = 1,
    ) -> None:
        self.folder, self.dtype, self.layers = folder, dtype, layers
        self.transport, self.members = transport, members
        self.meeting = folder / "meet"
        self.meeting.mkdir(exist_ok=True)
        self.groups = range(groups * members)
        self.shapes = [
            WindowShape(rows, hidden, top_k, local, dtype.itemsize, lanes) for local in experts
        ]
        self.fds = {
            (group, expert): create_windows(shape.total_bytes)
            for group in self.groups
            for expert, shape in enumerate(self.shapes)
        }
        self.endpoints: list[AttentionSide | ExpertSide] = []

    def address(self, me: RankId) -> str:
        return f"ipc://{self.folder}/{me.role[0]}{me.rank}.{me.incarnation}"

    def peer(self, who: RankId, group: int, expert: int) -> Peer:
        fd = self.fds[group, expert] if self.transport == "shm" else None
        return Peer(who, self.address(who), self.shapes[expert], fd)

    def carrier(self, me: RankId) -> Transport:
        if self.transport == "shm":
            return ShmTransport(self.dtype)
        carrier = NpuDouble() if self.transport == "hccl" else None
        return ProcessGroupTransport(me, self.dtype, FileMeeting(self.meeting), carrier)

    def attention(self, group: int = 0, incarnation: int = 0) -> AttentionSide:
        me = RankId("attention", group, incarnation)
        peers = [
            self.peer(RankId("expert", expert), group, expert) for expert in range(len(self.shapes))
        ]
        made = AttentionSide(
            me,
            Ear(self.address(me)),
            peers,
            self.carrier(me),
            self.dtype,
            self.layers,
            self.members,
        )
        self.endpoints.append(made)
        return made

    def expert(self, expert: int = 0, incarnation: int = 0) -> ExpertSide:
        me = RankId("expert", expert, incarnation)
        peers = [self.peer(RankId("attention", group), group, expert) for group in self.groups]
        made = ExpertSide(
            me,
            Ear(self.address(me)),
            peers,
            self.carrier(me),
            self.dtype,
            self.layers,
            self.members,
        )
        self.endpoints.append(made)
        return made

    def new_window(self, group: int, expert: int) -> None:
        os.close(self.fds[group, expert])
        self.fds[group, expert] = create_windows(self.shapes[expert].total_bytes)

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()
        for fd in self.fds.values():
            os.close(fd)


def wait(endpoint: AttentionSide | ExpertSide) -> None:
    poller = zmq.Poller()
    for source in endpoint.sources:
        poller.register(source, zmq.POLLIN)
    assert poller.poll(WAIT_MS), "nothing came"


def wait_for_bell(endpoint: AttentionSide | ExpertSide) -> None:
    bells, *_ = endpoint.sources
    assert bells.poll(WAIT_MS), "nobody rang"


def items(expert: ExpertSide, count: int = 1) -> list[WorkItem]:
    """The next `count` work items."""
    found = expert.dispatch_recv()
    while len(found) < count:
        wait(expert)
        found += expert.dispatch_recv()
    assert len(found) == count
    return found


def arrivals(attention: AttentionSide, count: int = 1) -> list[Arrival]:
    """The next `count` combines."""
    found = attention.combine_recv()
    while len(found) < count:
        wait(attention)
        found += attention.combine_recv()
    assert len(found) == count
    return found


def serve(expert: ExpertSide, item: WorkItem, first: int = 0) -> None:
    """Stands in for the experts: local expert e multiplies a row by first + e + 1."""
    work = expert.open(item)
    factors = torch.repeat_interleave(
        torch.arange(first + 1, first + 1 + len(work.counts)), work.counts
    )
    scaled = work.hidden[work.row_index].float() * (factors * work.weights)[:, None]
    total = torch.zeros(work.out.shape).index_add_(0, work.row_index, scaled)
    work.out.copy_(total)
    expert.combine_send(item, work)


def served(source: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What all of `serve` together make of `source`."""
    return source.float() * ((experts + 1) * weights).sum(1, keepdim=True)
