"""Random traffic between processes: everything arrives once, whole, and at its own lane."""

import multiprocessing
import random
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import zmq

from engine.comm.primitives import Arrival
from engine.comm.routing import RankDispatch
from helpers.pairs import WAIT_MS, Pairs, wait

SENDERS, RECEIVERS, MESSAGES = 3, 2, 10_000
LOCAL, ROWS, HIDDEN, TOP_K, LANES, LAYERS = 3, 8, 4, 2, 2, 4
_fork = multiprocessing.get_context("fork")


def token(group: int, batch: int) -> torch.Tensor:
    """The payload of a batch: small whole numbers that no other batch has, exact in float32."""
    return (batch * SENDERS + group) * 16.0 + torch.arange(ROWS * HIDDEN).view(ROWS, HIDDEN) % 16


def random_part(rng: random.Random) -> RankDispatch:
    rows = sorted(rng.sample(range(ROWS), rng.randint(0, ROWS)))
    pairs = sorted(
        (expert, place)
        for place in range(len(rows))
        for expert in rng.sample(range(LOCAL), rng.randint(1, TOP_K))
    )
    return RankDispatch(
        rows=torch.tensor(rows, dtype=torch.int64),
        counts=torch.bincount(
            torch.tensor([expert for expert, _ in pairs], dtype=torch.int64), minlength=LOCAL
        ).to(torch.int32),
        row_index=torch.tensor([place for _, place in pairs], dtype=torch.int32),
        weights=torch.tensor([float(rng.randint(1, 4)) for _ in pairs]),
    )


def answer(rank: int, layer: int, hidden: torch.Tensor, part: Any) -> torch.Tensor:
    """What expert rank `rank` makes of `hidden`; exact, and other for every rank and layer."""
    total = torch.zeros(hidden.shape)
    pair = 0
    for expert, count in enumerate(part.counts.tolist()):
        for _ in range(count):
            row = int(part.row_index[pair])
            total[row] += hidden[row] * part.weights[pair] * (expert + 1 + 3 * rank) + layer
            pair += 1
    return total


def send(pairs: Pairs, group: int, messages: int, pipe: Connection) -> int:
    """An attention rank: dispatches at random, leaves arrivals lying about, checks every row."""
    rng = random.Random(group)
    endpoint = pairs.attention(group)
    assert endpoint.warm_up(WAIT_MS / 1000) == []
    sent: dict[tuple[int, int], tuple[int, int, int, RankDispatch]] = {}
    arrived: list[Arrival] = []
    done, next_batch = 0, 0
    while done < messages:
        expert, lane = rng.randrange(RECEIVERS), rng.randrange(LANES)
        if next_batch < messages and rng.random() < 0.7:
            layer, tile, part = rng.randrange(LAYERS), rng.randrange(100), random_part(rng)
            source = token(group, next_batch)
            free = endpoint.is_free(expert, lane)
            assert free == ((expert, lane) not in sent)
            gone = endpoint.dispatch_send(expert, lane, next_batch, layer, tile, source, part)
            assert gone == free
            if gone:
                sent[expert, lane] = (next_batch, layer, tile, part)
                next_batch += 1
                continue
        if sent and not arrived:
            wait(endpoint)
        arrived += endpoint.combine_recv()
        rng.shuffle(arrived)
        for _ in range(rng.randint(0, len(arrived))):
            arrival = arrived.pop()
            batch, layer, tile, part = sent.pop((arrival.expert, arrival.lane))
            assert (arrival.batch, arrival.layer, arrival.tile) == (batch, layer, tile)
            expected = torch.zeros(ROWS, HIDDEN)
            hidden = token(group, batch)[part.rows]
            expected[part.rows] = answer(arrival.expert, layer, hidden, part)
            into = torch.zeros(ROWS, HIDDEN)
            endpoint.combine_add(arrival, part.rows, into)
            assert torch.equal(into, expected)
            done += 1
    assert not sent
    assert endpoint.combine_recv() == []
    return done


def receive(pairs: Pairs, rank: int, messages: int, pipe: Connection) -> int:
    """An expert rank: serves what has come in any order, until it is told to stop."""
    rng = random.Random(100 + rank)
    endpoint = pairs.expert(rank)
    assert endpoint.warm_up(WAIT_MS / 1000) == []
    poller = zmq.Poller()
    for source in (*endpoint.sources, pipe):
        poller.register(source, zmq.POLLIN)
    waiting = endpoint.dispatch_recv()
    served = 0
    while True:
        if not waiting:
            if pipe.fileno() in dict(poller.poll()):
                return served
            waiting += endpoint.dispatch_recv()
            continue
        rng.shuffle(waiting)
        item = waiting.pop()
        work = endpoint.open(item)
        hidden = token(item.group, item.batch)
        for row in work.hidden:  # each is a row of the batch that the bell named
            assert any(torch.equal(row, other) for other in hidden)
        work.out.copy_(answer(rank, item.layer, work.hidden, work))
        endpoint.combine_send(item, work)
        served += 1
        if rng.random() < 0.5:
            waiting += endpoint.dispatch_recv()


def _child(role: Callable[..., int], pairs: Pairs, rank: int, messages: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    pipe.send(role(pairs, rank, messages, pipe))
    for endpoint in pairs.endpoints:
        assert endpoint.dropped == 0
        endpoint.close()


def test_ten_thousand_messages(make_pairs: Callable[..., Pairs]) -> None:
    pairs = make_pairs(
        groups=SENDERS,
        experts=(LOCAL,) * RECEIVERS,
        **{"rows": ROWS, "hidden": HIDDEN, "top_k": TOP_K, "lanes": LANES, "layers": LAYERS},
    )
    ranks: list[tuple[Any, Connection]] = []

    def start(role: Callable[..., int], rank: int, messages: int) -> tuple[Any, Connection]:
        ours, theirs = _fork.Pipe()
        process = _fork.Process(target=_child, args=(role, pairs, rank, messages, theirs))
        process.start()
        theirs.close()
        ranks.append((process, ours))
        return ranks[-1]

    # The stand-in for HCCL is slow, and its messages are those of gloo.
    messages = MESSAGES if pairs.transport != "hccl" else MESSAGES // 5
    try:
        receivers = [start(receive, rank, 0) for rank in range(RECEIVERS)]
        shares = [messages // SENDERS + (rank < messages % SENDERS) for rank in range(SENDERS)]
        senders = [start(send, group, share) for group, share in enumerate(shares)]
        assert [pipe.recv() for _, pipe in senders] == shares
        for _, pipe in receivers:
            pipe.send("stop")
        assert sum(pipe.recv() for _, pipe in receivers) == messages
        for process, _ in ranks:
            process.join(20)
            assert process.exitcode == 0
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()
