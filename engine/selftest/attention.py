"""The attention rank of a self-test: sends messages, checks every value that comes back."""

from __future__ import annotations

import math
import random
import time
from collections import deque
from statistics import median

import torch
import zmq

from engine.comm.attention_side import AttentionSide
from engine.comm.primitives import Arrival
from engine.comm.routing import RankDispatch
from engine.device.base import Device
from engine.errors import RunError
from engine.selftest.messages import Exchange, Exchanged, Measure, Measured, PairTime, Patience
from engine.selftest.rank import MOST_PROBLEMS, Rank, opened
from engine.selftest.traffic import TIMED
from engine.worker.lifeline import Lifeline
from engine.worker.meter import Meter
from engine.worker.rank import run_rank
from engine.worker.spec import RankSpec

_EMPTY_ROUNDS, _FULL_ROUNDS = 50, 8
_WARM_ROUNDS = 3  # not counted: what is loaded or set up at first use


class _Sender:
    def __init__(self, rank: Rank, endpoint: AttentionSide) -> None:
        self._rank = rank
        self._me = rank.spec.id
        self._endpoint = endpoint
        self._device = rank.device
        self._group = self._me.rank // rank.spec.shard.size
        self._traffic = {
            peer.id.rank: rank.traffic(peer.id.rank, rank.device.torch) for peer in rank.spec.peers
        }
        shape = rank.spec.peers[0].shape
        self._into = torch.zeros(shape.rows, shape.hidden, device=rank.device.torch)
        self._poller = zmq.Poller()
        for source in endpoint.sources:
            self._poller.register(source, zmq.POLLIN)
        self._rng = random.Random(self._me.rank)
        self._flying: dict[tuple[int, int], tuple[int, RankDispatch]] = {}
        self._problems: list[str] = []
        self._timed = TIMED

    def exchange(self, count: int, stall_s: float) -> Exchanged:
        """`count` messages to every expert rank. All members of the group send the messages of a
        lane in one order, since a work item is those of all of them.
        """
        unsent: dict[tuple[int, int], deque[int]] = {}
        for expert, traffic in self._traffic.items():
            for number in range(count):
                lane = traffic.place(self._group, number).lane
                unsent.setdefault((expert, lane), deque()).append(number)
        arrived: list[Arrival] = []
        patience = Patience(stall_s)
        good = 0
        while unsent or self._flying:
            for expert, lane in self._rng.sample(list(unsent), len(unsent)):
                if self._endpoint.is_free(expert, lane):
                    self._send(expert, lane, unsent[expert, lane].popleft())
                    if not unsent[expert, lane]:
                        del unsent[expert, lane]
            if not arrived:
                self._wait(patience)
            if new := self._endpoint.combine_recv():
                patience.renew()
                arrived += new
            # Some are left lying about, as a rank does that is busy with something else.
            self._rng.shuffle(arrived)
            for _ in range(self._rng.randint(min(1, len(arrived)), len(arrived))):
                good += self._take(arrived.pop())
        return Exchanged(good, self._problems)

    def measure(self, stall_s: float) -> Measured:
        """One expert rank after another; the members of a group together."""
        pairs = []
        for expert, traffic in self._traffic.items():
            rows = traffic.shape.rows
            empty = self._times(expert, 1, _EMPTY_ROUNDS, stall_s)
            full = self._times(expert, rows, _FULL_ROUNDS, stall_s)
            pairs.append(PairTime(expert, empty, full, traffic.shape.rows_bytes))
        return Measured(pairs)

    def _send(self, expert: int, lane: int, number: int) -> None:
        traffic = self._traffic[expert]
        _, layer, tile = traffic.place(self._group, number)
        part = traffic.part(self._me.rank, number)
        source = traffic.source(self._me.rank, number)
        if not self._endpoint.dispatch_send(expert, lane, number, layer, tile, source, part):
            raise RunError(f"{self._me}: lane {lane} of expert {expert} is free, and takes nothing")
        self._flying[expert, lane] = (number, part)

    def _take(self, arrival: Arrival) -> bool:
        """Adds what came, and says whether it is right."""
        number, part = self._flying.pop((arrival.expert, arrival.lane))
        traffic = self._traffic[arrival.expert]
        device = self._device.torch
        rows = part.rows.to(device)
        self._endpoint.combine_add(arrival, part.rows, self._into)
        routing = RankDispatch(
            rows, part.counts.to(device), part.row_index.to(device), part.weights.to(device)
        )
        sent = traffic.source(self._me.rank, number)[rows]
        wanted = traffic.answer(arrival.layer, sent, routing)
        wrong = int((self._into[rows] != wanted).sum())
        self._into[rows] = 0
        if wrong and len(self._problems) < MOST_PROBLEMS:
            self._problems.append(
                f"{self._me} and expert {arrival.expert}: message {number} (lane {arrival.lane}, "
                f"{arrival.n} rows) came back with {wrong} of {wanted.numel()} values wrong"
            )
        return not wrong

    def _times(self, expert: int, rows: int, rounds: int, stall_s: float) -> float:
        """Median seconds from a dispatch of `rows` rows until its combine has been added."""
        traffic = self._traffic[expert]
        source = traffic.source(self._me.rank, 0)
        counts = torch.zeros(traffic.shape.local_experts, dtype=torch.int32)
        counts[0] = rows
        index = torch.arange(rows)
        part = RankDispatch(index, counts, index.to(torch.int32), torch.ones(rows))
        taken = []
        for _ in range(_WARM_ROUNDS + rounds):
            self._device.synchronize(self._device.record())
            begin = time.perf_counter()
            self._endpoint.dispatch_send(expert, 0, self._timed, 0, 0, source, part)
            patience = Patience(stall_s)
            while not (arrivals := self._endpoint.combine_recv()):
                self._wait(patience)
            self._endpoint.combine_add(arrivals[0], index, self._into)
            self._device.synchronize(self._device.record())
            taken.append(time.perf_counter() - begin)
            self._timed += 1
        self._into.zero_()
        return median(taken[_WARM_ROUNDS:])

    def _wait(self, patience: Patience) -> None:
        """Until something comes. RunError: it has not for too long."""
        if not self._poller.poll(math.ceil(patience.left_s * 1000)) and not patience.left_s:
            awaited = [f"message {n} of expert {e}" for (e, _), (n, _) in self._flying.items()]
            shown = ", ".join(awaited[:MOST_PROBLEMS]) or "a message"
            raise RunError(f"{self._me} waits in vain for the answer to {shown}")


def main(payload: bytes, fds: list[int]) -> None:
    """Runs an attention rank of a self-test as this process; see `run_rank`."""
    run_rank(payload, fds, _run)


def _run(
    spec: RankSpec, device: Device, windows: list[int], lifeline: Lifeline, meter: Meter
) -> None:
    with opened(spec, device, windows, AttentionSide) as (rank, endpoint):
        rank.warm_up(endpoint)
        sender = _Sender(rank, endpoint)
        while True:
            rank.orders.source.poll()
            match rank.orders.receive():
                case Exchange(count, stall_s):
                    rank.orders.answer(sender.exchange(count, stall_s))
                case Measure(stall_s):
                    rank.orders.answer(sender.measure(stall_s))
                case order:
                    rank.obey(order)
