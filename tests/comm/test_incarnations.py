"""Bells of lives that are over, bells that make no sense, and switching to a new life."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import zmq

from engine.comm.attention_side import AttentionSide
from engine.comm.doorbell import Bell, BellBox, BellRinger, Ear, Kind
from engine.comm.expert_side import ExpertSide
from engine.comm.routing import plan_dispatch
from engine.comm.shm import ShmTransport
from engine.comm.windows import Window
from engine.errors import RunError
from engine.topology.ranks import RankId
from helpers.pairs import WAIT_MS, Pairs, arrivals, items, serve, wait, wait_for_bell

MakePairs = Callable[..., Pairs]

SOURCE = torch.arange(12.0).view(3, 4)
(PART,) = plan_dispatch(torch.tensor([[0, 1], [1, 0], [0, 1]]), torch.ones(3, 2), [range(2)])


def ring(pairs: Pairs, to: RankId, *bells: Bell | bytes) -> None:
    """Rings without an endpoint, and waits until all of it is delivered."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(pairs.address(to))
        for bell in bells:
            socket.send(bell.pack() if isinstance(bell, Bell) else bell)


def test_a_bell_is_packed_without_loss() -> None:
    bell = Bell(Kind.COMBINE, RankId("expert", 9, 2), 3, 2**40, 1, 60, 5, 4096, 32768)
    assert Bell.unpack(bell.pack()) == bell


def test_bells_of_other_lives_are_dropped_and_counted(make_pairs: MakePairs) -> None:
    pairs = make_pairs()
    attention, expert = RankId("attention", 0, 1), RankId("expert", 0, 4)
    with zmq.Context() as context:
        box = BellBox(context, expert, Ear(pairs.address(expert)))
        box.expect([attention])
        ringer = BellRinger(context, expert, pairs.address(expert))
        wrong = [
            Bell(Kind.DISPATCH, attention, receiver=3),
            Bell(Kind.DISPATCH, RankId("attention", 0, 0), receiver=4),
            Bell(Kind.DISPATCH, RankId("attention", 0, 2), receiver=4),
            Bell(Kind.DISPATCH, RankId("attention", 1, 1), receiver=4),
        ]
        good = Bell(Kind.DISPATCH, attention, receiver=4)
        for bell in [*wrong, good]:
            ringer.ring(bell)
        heard: list[Bell] = []
        while not heard:
            assert box.socket.poll(WAIT_MS)
            heard = box.drain()
        assert heard == [good]
        assert box.dropped == len(wrong)
        ringer.close()
        box.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lane": 2}, "lane 2"),
        ({"layer": 4}, "layer 4"),
        ({"n": 9, "p": 9}, "n 9"),
        ({"n": 1, "p": 3}, "p 3"),
        ({"kind": Kind.COMBINE}, "combine"),
    ],
)
def test_numbers_beyond_the_window_are_an_error(
    make_pairs: MakePairs, change: dict[str, int], message: str
) -> None:
    pairs = make_pairs()
    expert = pairs.expert()
    fields = {"kind": Kind.DISPATCH, "lane": 1, "layer": 3, "n": 8, "p": 16} | change
    ring(pairs, expert.me, Bell(sender=RankId("attention", 0), receiver=0, **fields))
    wait_for_bell(expert)
    with pytest.raises(RunError, match=f"attention 0 .*expert 0.* {message}"):
        expert.dispatch_recv()


def test_the_largest_numbers_are_fine(make_windows: MakePairs) -> None:
    pairs = make_windows()
    expert = pairs.expert()
    sender = RankId("attention", 0)
    ring(pairs, expert.me, Bell(Kind.DISPATCH, sender, 0, lane=1, layer=3, n=8, p=16))
    assert items(expert)[0].p == 16


@pytest.mark.parametrize("data", [b"", b"x" * 44, b"x" * 48])
def test_other_bytes_are_an_error(make_pairs: MakePairs, data: bytes) -> None:
    pairs = make_pairs()
    expert = pairs.expert()
    ring(pairs, expert.me, data)
    wait_for_bell(expert)
    with pytest.raises(RunError, match="doorbell"):
        expert.dispatch_recv()


@pytest.mark.parametrize("name", ["row_index", "counts"])
@pytest.mark.parametrize("value", [-1, 3])
def test_a_routing_table_that_points_outside_is_an_error(
    make_windows: MakePairs, name: str, value: int
) -> None:
    pairs = make_windows()
    attention, expert = pairs.attention(), pairs.expert()
    attention.dispatch_send(0, 0, 1, 0, 0, SOURCE, PART)
    (item,) = items(expert)
    expert.open(item)
    region = Window(pairs.fds[0, 0], pairs.shapes[0], torch.float32).region(0)
    table = getattr(region, name)
    table[0] = value
    if name == "counts":
        table[1] = item.p - value if value < 0 else 0  # the sum alone does not give it away
    with pytest.raises(RunError, match="routing table"):
        expert.open(item)


def test_a_lane_used_twice_is_an_error(make_pairs: MakePairs) -> None:
    pairs = make_pairs()
    expert = pairs.expert()
    bell = Bell(Kind.DISPATCH, RankId("attention", 0), 0)
    ring(pairs, expert.me, bell, bell)
    with pytest.raises(RunError, match="lane 0 again"):
        items(expert, 2)


def test_an_answer_nobody_asked_for_is_an_error(make_pairs: MakePairs) -> None:
    pairs = make_pairs()
    attention = pairs.attention()
    attention.dispatch_send(0, 0, 1, 0, 0, SOURCE, PART)
    wrong = Bell(Kind.COMBINE, RankId("expert", 0), 0, batch=2)
    ring(pairs, attention.me, wrong)
    wait_for_bell(attention)
    with pytest.raises(RunError, match="not asked"):
        attention.combine_recv()


def test_another_life_of_an_expert_rank(make_recovering: MakePairs) -> None:
    pairs = make_recovering()
    attention, old = pairs.attention(), pairs.expert()
    for lane in range(2):
        attention.dispatch_send(0, lane, 5, 0, lane, SOURCE, PART)
    pending = items(old, 2)
    serve(old, pending[0])
    (arrival,) = arrivals(attention)  # arrived but never added

    pairs.new_window(0, 0)
    new = pairs.expert(incarnation=1)
    lost = attention.reconnect(pairs.peer(new.me, 0, 0))
    assert [(lost_one.lane, lost_one.batch) for lost_one in lost] == [(0, 5), (1, 5)]
    with pytest.raises(ValueError, match="not waiting"):
        attention.combine_add(arrival, PART.rows, torch.zeros(3, 4))
    serve(old, pending[1])  # the old life answers late
    wait_for_bell(attention)
    assert attention.combine_recv() == []
    assert attention.dropped == 1

    assert attention.dispatch_send(0, 1, 5, 0, 1, SOURCE, PART)  # sent again
    serve(new, items(new)[0])
    (arrival,) = arrivals(attention)
    into = torch.zeros(3, 4)
    attention.combine_add(arrival, PART.rows, into)
    assert torch.equal(into, 3 * SOURCE)
    with pytest.raises(ValueError, match="already in incarnation 1"):
        attention.reconnect(pairs.peer(new.me, 0, 0))


def test_another_life_of_an_attention_rank(make_recovering: MakePairs) -> None:
    pairs = make_recovering()
    old, expert = pairs.attention(), pairs.expert()
    old.dispatch_send(0, 0, 5, 0, 0, SOURCE, PART)
    (stale,) = items(expert)
    work = expert.open(stale)
    old.dispatch_send(0, 1, 6, 0, 0, SOURCE, PART)
    wait_for_bell(expert)  # rung, not yet heard

    pairs.new_window(0, 0)
    new = pairs.attention(incarnation=1)
    expert.reconnect(pairs.peer(new.me, 0, 0))
    assert expert.dispatch_recv() == []
    assert expert.dropped == 1
    assert not expert.is_current(stale)
    work.out.zero_()  # still memory, though nobody reads it
    expert.combine_send(stale, work)  # tells nobody
    with pytest.raises(ValueError, match="not waiting"):
        expert.open(stale)

    new.dispatch_send(0, 0, 5, 0, 0, SOURCE, PART)
    (item,) = items(expert)
    assert expert.is_current(item)
    serve(expert, item)
    arrivals(new)


def test_another_life_of_a_group_voids_what_any_member_sent(make_recovering: MakePairs) -> None:
    pairs = make_recovering(members=2)
    expert = pairs.expert()
    old = [pairs.attention(rank) for rank in range(2)]
    for lane, senders in enumerate((old, old[1:])):  # one item whole, one of which half came
        for member in senders:
            member.dispatch_send(0, lane, 5, 0, 0, SOURCE, PART)
    (stale,) = items(expert)
    work = expert.open(stale)
    while not expert.holds(1, 1):
        wait(expert)
        assert expert.dispatch_recv() == []

    new = []
    for rank in range(2):
        pairs.new_window(rank, 0)
        new.append(pairs.attention(rank, incarnation=1))
        expert.reconnect(pairs.peer(new[rank].me, rank, 0))
    assert not expert.is_current(stale)
    expert.combine_send(stale, work)  # tells nobody
    for lane in range(2):
        for member in new:
            member.dispatch_send(0, lane, 5, 0, 0, SOURCE, PART)
    for item in items(expert, 2):
        assert (item.n, item.incarnation) == (6, 1)
        serve(expert, item)
    for member in new:
        arrivals(member, 2)


def test_a_dispatch_heard_during_warm_up_is_void_after_a_new_life(
    make_recovering: MakePairs,
) -> None:
    pairs = make_recovering(groups=2)
    old, expert = pairs.attention(0), pairs.expert()
    old.dispatch_send(0, 0, 5, 0, 0, SOURCE, PART)
    assert expert.warm_up(0.2) == [RankId("attention", 1)]
    pairs.new_window(0, 0)
    expert.reconnect(pairs.peer(RankId("attention", 0, 1), 0, 0))
    assert expert.dispatch_recv() == []
    assert expert.dropped == 0  # it was heard, and by an expert that knew its sender


def test_a_new_life_rings_until_it_is_known(make_recovering: MakePairs) -> None:
    pairs = make_recovering()
    expert = pairs.expert()
    pairs.new_window(0, 0)
    new = pairs.attention(incarnation=1)
    with ThreadPoolExecutor(1) as side:
        warm = side.submit(new.warm_up, WAIT_MS / 1000)
        while not expert.dropped:
            wait_for_bell(expert)
            expert.dispatch_recv()
        expert.reconnect(pairs.peer(new.me, 0, 0))
        wait_for_bell(expert)
        expert.dispatch_recv()
        assert warm.result() == []


@pytest.mark.parametrize("kind", [AttentionSide, ExpertSide])
def test_an_address_that_cannot_be_bound(kind: Callable[..., object], tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"expert 0 cannot listen at ipc://.*xxx"):
        kind(
            RankId("expert", 0),
            Ear(f"ipc://{tmp_path}/{'x' * 120}"),
            [],
            ShmTransport(torch.float32),
            torch.float32,
            1,
        )
