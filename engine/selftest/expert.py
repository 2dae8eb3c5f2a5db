"""The expert rank of a self-test: checks what comes, and answers it."""

from __future__ import annotations

import random

import torch
import zmq

from engine.comm.expert_side import ExpertSide
from engine.comm.primitives import Work, WorkItem
from engine.comm.routing import Routing, merge
from engine.device.base import Device
from engine.selftest.messages import Account, Accounted, Exchange
from engine.selftest.rank import MOST_PROBLEMS, Rank, opened
from engine.selftest.traffic import TIMED
from engine.worker.lifeline import Lifeline
from engine.worker.meter import Meter
from engine.worker.rank import run_rank
from engine.worker.spec import RankSpec

_CPU = torch.device("cpu")


class _Server:
    def __init__(self, rank: Rank, endpoint: ExpertSide) -> None:
        spec = rank.spec
        self._me = spec.id
        self._endpoint = endpoint
        self._device = rank.device.torch
        self._members = spec.shard.size
        self._groups = len(spec.peers) // self._members
        self._traffic = rank.traffic(spec.id.rank, _CPU)  # rows are compared there
        self._rng = random.Random(spec.id.rank)
        self._expected = 0
        self._seen: dict[int, set[int]] = {group: set() for group in range(self._groups)}
        self._good = 0
        self._problems: list[str] = []

    def expect(self, count: int) -> None:
        """Of each attention group."""
        self._expected = count

    def serve(self) -> None:
        """Everything that has come, in any order."""
        items = self._endpoint.dispatch_recv()
        self._rng.shuffle(items)
        for item in items:
            work = self._endpoint.open(item)
            if item.batch < TIMED:
                self._check(item, work)
                self._answer(item, work)
            self._endpoint.combine_send(item, work)

    def account(self) -> Accounted:
        for group, seen in self._seen.items():
            for numbers, fate in (
                (set(range(self._expected)) - seen, "never came"),
                (seen - set(range(self._expected)), "came and were never sent"),
            ):
                if numbers:
                    self._problem(
                        f"{len(numbers)} messages of attention group {group} {fate}, "
                        f"the first is {min(numbers)}"
                    )
        return Accounted(self._good, self._problems)

    def _check(self, item: WorkItem, work: Work) -> None:
        what = f"message {item.batch} of attention group {item.group}"
        traffic, number = self._traffic, item.batch
        if number in self._seen[item.group]:
            self._problem(f"{what} came twice")
            return
        self._seen[item.group].add(number)
        first = item.group * self._members
        senders = range(first, first + self._members)
        parts = [traffic.part(sender, number) for sender in senders]
        wrong = []
        if (item.lane, item.layer, item.tile) != traffic.place(item.group, number):
            wrong.append("lane, layer or tile")
        rows = [traffic.source(s, number)[p.rows] for s, p in zip(senders, parts, strict=True)]
        if not torch.equal(work.hidden.cpu(), torch.cat(rows)):
            wrong.append("rows")
        routing = merge(
            [Routing(p.counts, p.row_index, p.weights) for p in parts], [p.n for p in parts]
        )
        came = Routing(work.counts, work.row_index, work.weights)
        if not all(torch.equal(a.cpu(), b) for a, b in zip(came, routing, strict=True)):
            wrong.append("routing")
        if wrong:
            self._problem(f"{what} ({item.n} rows) came with other {' and '.join(wrong)}")
        else:
            self._good += 1

    def _answer(self, item: WorkItem, work: Work) -> None:
        """Computed where experts are computed, be that where the payload lies or not."""
        hidden = work.hidden.to(self._device)
        parts = (work.counts, work.row_index, work.weights)
        routing = Routing(*(part.to(self._device) for part in parts))
        work.out.copy_(self._traffic.answer(item.layer, hidden, routing))

    def _problem(self, text: str) -> None:
        if len(self._problems) < MOST_PROBLEMS:
            self._problems.append(f"{self._me}: {text}")


def main(payload: bytes, fds: list[int]) -> None:
    """Runs an expert rank of a self-test as this process; see `run_rank`."""
    run_rank(payload, fds, _run)


def _run(
    spec: RankSpec, device: Device, windows: list[int], lifeline: Lifeline, meter: Meter
) -> None:
    with opened(spec, device, windows, ExpertSide) as (rank, endpoint):
        rank.warm_up(endpoint)
        server = _Server(rank, endpoint)
        poller = zmq.Poller()
        for source in (*endpoint.sources, rank.orders.source):
            poller.register(source, zmq.POLLIN)
        while True:
            match rank.orders.receive():
                case Exchange(count, _):
                    server.expect(count)
                case Account():
                    rank.orders.answer(server.account())
                case None:
                    poller.poll()
                case order:
                    rank.obey(order)
            server.serve()
