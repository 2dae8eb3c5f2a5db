"""The four primitives between endpoints of one process: what goes, what waits, what comes back."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.comm.attention_side import AttentionSide
from engine.comm.layout import tiles
from engine.comm.routing import RankDispatch, plan_dispatch
from engine.errors import RunError
from engine.topology.ranks import RankId
from helpers.pairs import Pairs, arrivals, items, serve, served, wait

MakePairs = Callable[..., Pairs]


def routed(
    tokens: int, experts: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Random rows [tokens, 4], two experts each of `experts`, and weights."""
    torch.manual_seed(tokens)
    source = torch.randn(tokens, 4).to(dtype)
    return source, torch.rand(tokens, experts).topk(2).indices, torch.rand(tokens, 2)


def one_part(tokens: int = 3) -> tuple[Tensor, RankDispatch]:
    source, experts, weights = routed(tokens, 2)
    return source, plan_dispatch(experts, weights, [range(2)])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_there_and_back(make_pairs: MakePairs, dtype: torch.dtype) -> None:
    pairs = make_pairs(dtype=dtype)
    attention, expert = pairs.attention(), pairs.expert()
    source, experts, weights = routed(5, 2, dtype)
    (part,) = plan_dispatch(experts, weights, [range(2)])

    assert attention.dispatch_send(0, 1, 7, 3, 0, source, part)
    (item,) = items(expert)
    assert (item.group, item.batch, item.lane, item.layer, item.tile) == (0, 7, 1, 3, 0)
    work = expert.open(item)
    assert torch.equal(work.hidden, source[part.rows])
    assert torch.equal(work.row_index, part.row_index)
    assert torch.equal(work.weights, part.weights)
    assert torch.equal(work.counts, part.counts)

    serve(expert, item)
    (arrival,) = arrivals(attention)
    assert not attention.is_free(0, 1)
    into = torch.ones(5, 4)
    attention.combine_add(arrival, part.rows, into)
    assert attention.is_free(0, 1)
    torch.testing.assert_close(into, 1 + served(source, experts, weights).to(dtype).float())


@pytest.mark.parametrize("first", [0, 1])
def test_tiles_and_arrival_order_do_not_change_a_bit(make_pairs: MakePairs, first: int) -> None:
    pairs = make_pairs(experts=(3, 2), rows=4)
    attention, ranks = pairs.attention(), [pairs.expert(0), pairs.expert(1)]
    bounds = [range(3), range(3, 5)]
    source, experts, weights = routed(11, 5)
    into = torch.zeros(11, 4)
    for number, tile in enumerate(tiles(11, 4)):
        parts = plan_dispatch(experts[tile], weights[tile], bounds)
        for rank, part in enumerate(parts):
            assert attention.dispatch_send(rank, 0, 1, 2, number, source[tile], part)
        found = []
        for rank in (first, 1 - first):
            serve(ranks[rank], items(ranks[rank])[0], bounds[rank].start)
            found += arrivals(attention)
        for arrival in sorted(found, key=lambda arrival: arrival.expert):
            assert arrival.tile == number
            attention.combine_add(arrival, parts[arrival.expert].rows, into[tile])

    torch.testing.assert_close(into, served(source, experts, weights))
    bits = torch.zeros(11, 4)
    for span in bounds:  # one batch, no tiles, rank order
        local = (experts >= span.start) & (experts < span.stop)
        factors = torch.where(local, (experts + 1) * weights, 0.0)
        sorted_factors = factors.gather(1, experts.argsort(1))
        part = torch.zeros(11, 4)
        for slot in range(2):
            part += source * sorted_factors[:, slot : slot + 1]
        bits += part
    assert torch.equal(into, bits)


def test_no_rows_are_announced_and_answered(make_pairs: MakePairs) -> None:
    pairs = make_pairs(experts=(2, 0))
    attention, ranks = pairs.attention(), [pairs.expert(0), pairs.expert(1)]
    source, experts, weights = routed(3, 2)
    parts = plan_dispatch(experts, weights, [range(2), range(2, 2)])
    into = torch.zeros(3, 4)
    for rank, part in ((1, parts[1]), (0, plan_dispatch(experts[:0], weights[:0], [range(2)])[0])):
        assert part.n == 0
        assert attention.dispatch_send(rank, 0, 1, 0, 0, source, part)
        serve(ranks[rank], items(ranks[rank])[0])
        attention.combine_add(arrivals(attention)[0], part.rows, into)
    assert not into.any()


def test_a_full_window_blocks_its_sender_only(make_pairs: MakePairs) -> None:
    pairs = make_pairs(groups=2)
    full, other, expert = pairs.attention(0), pairs.attention(1), pairs.expert()
    source, part = one_part()
    for lane in range(2):
        assert full.dispatch_send(0, lane, lane, 0, 0, source, part)
    for lane in range(2):
        assert not full.is_free(0, lane)
        assert not full.dispatch_send(0, lane, 9, 0, 0, source * 2, part)
    held = items(expert, 2)
    assert torch.equal(expert.open(held[0]).hidden, source[part.rows])  # nothing was overwritten

    assert other.dispatch_send(0, 0, 5, 0, 0, source, part)  # and is served before the others
    (item,) = items(expert)
    assert item.group == 1
    serve(expert, item)
    arrivals(other)

    serve(expert, held[1])
    (arrival,) = arrivals(full)
    assert not full.is_free(0, 1)  # the combine is there but not taken
    assert not full.dispatch_send(0, 1, 9, 0, 0, source, part)
    full.combine_add(arrival, part.rows, torch.zeros(3, 4))
    assert full.dispatch_send(0, 1, 9, 0, 0, source, part)
    assert not full.is_free(0, 0)


def test_ringing_before_anybody_listens(make_pairs: MakePairs) -> None:
    pairs = make_pairs()
    attention = pairs.attention()
    source, part = one_part()
    assert attention.dispatch_send(0, 0, 1, 0, 0, source, part)
    expert = pairs.expert()
    serve(expert, items(expert)[0])
    arrivals(attention)


def test_what_cannot_fit_is_refused(make_pairs: MakePairs) -> None:
    pairs = make_pairs(rows=3)
    attention = pairs.attention()
    source, part = one_part(4)
    with pytest.raises(ValueError, match="4 rows"):
        attention.dispatch_send(0, 0, 1, 0, 0, source, part)
    source, part = one_part(3)
    with pytest.raises(ValueError, match="float64"):
        attention.dispatch_send(0, 0, 1, 0, 0, source.double(), part)
    with pytest.raises(ValueError, match=r"\[N, 4\]"):
        attention.dispatch_send(0, 0, 1, 0, 0, source[:, :2], part)
    assert attention.is_free(0, 0)


def test_a_combine_is_added_once_and_to_its_own_rows(make_pairs: MakePairs) -> None:
    pairs = make_pairs()
    attention, expert = pairs.attention(), pairs.expert()
    source, part = one_part()
    attention.dispatch_send(0, 0, 1, 0, 0, source, part)
    serve(expert, items(expert)[0])
    (arrival,) = arrivals(attention)
    into = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="3 rows arrived"):
        attention.combine_add(arrival, part.rows[:2], into)
    attention.combine_add(arrival, part.rows, into)
    with pytest.raises(ValueError, match="not waiting"):
        attention.combine_add(arrival, part.rows, into)


def test_the_dispatches_of_a_group_are_one_work_item(make_pairs: MakePairs) -> None:
    pairs = make_pairs(groups=2, members=2, experts=(3,))
    expert = pairs.expert()
    members = [pairs.attention(rank) for rank in range(4)][2:]  # of group 1
    source, experts, weights = routed(7, 3)
    shares = [slice(0, 4), slice(4, 7)]
    parts = [plan_dispatch(experts[own], weights[own], [range(3)])[0] for own in shares]
    for _ in range(2):  # the lane is free again afterwards
        assert members[1].dispatch_send(0, 1, 8, 2, 0, source[shares[1]], parts[1])
        wait(expert)
        assert expert.dispatch_recv() == []
        assert members[0].dispatch_send(0, 1, 8, 2, 0, source[shares[0]], parts[0])
        (item,) = items(expert)
        assert (item.group, item.lane, item.n, item.p) == (1, 1, 7, 14)
        work = expert.open(item)
        assert torch.equal(work.hidden, source)
        whole = plan_dispatch(experts, weights, [range(3)])[0]
        for name in ("counts", "row_index", "weights"):
            assert torch.equal(getattr(work, name), getattr(whole, name))
        serve(expert, item)
        into = torch.zeros(7, 4)
        for member, part, own in zip(members, parts, shares, strict=True):
            member.combine_add(arrivals(member)[0], part.rows, into[own])
        torch.testing.assert_close(into, served(source, experts, weights))


def test_a_member_without_rows_is_waited_for_and_answered(make_pairs: MakePairs) -> None:
    pairs = make_pairs(members=2)
    expert = pairs.expert()
    members = [pairs.attention(rank) for rank in range(2)]
    source, part = one_part()
    (nothing,) = plan_dispatch(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2), [range(2)])
    members[0].dispatch_send(0, 0, 1, 0, 0, source, part)
    wait(expert)
    assert expert.dispatch_recv() == []
    members[1].dispatch_send(0, 0, 1, 0, 0, source[:0], nothing)
    (item,) = items(expert)
    assert item.n == part.n
    serve(expert, item)
    into = torch.zeros(3, 4)
    members[1].combine_add(arrivals(members[1])[0], nothing.rows, into[:0])
    assert not into.any()
    members[0].combine_add(arrivals(members[0])[0], part.rows, into)
    assert into.any()


def test_members_of_a_group_that_disagree_are_an_error(make_pairs: MakePairs) -> None:
    pairs = make_pairs(members=2)
    expert = pairs.expert()
    source, part = one_part()
    for rank in range(2):
        pairs.attention(rank).dispatch_send(0, 0, 1, rank, 0, source, part)
    with pytest.raises(RunError, match="attention group 0 disagree in lane 0"):
        items(expert)


def test_what_is_sent_again_waits_for_no_other_rank_of_its_group(make_pairs: MakePairs) -> None:
    """An expert rank had answered tile 4 of one rank and not of the other when it died."""
    pairs = make_pairs(members=2)
    expert = pairs.expert()
    behind, ahead = (pairs.attention(rank) for rank in range(2))
    source, part = one_part()

    def send(member: AttentionSide, tile: int, again: bool, layer: int = 0) -> None:
        assert member.dispatch_send(0, 0, 1, layer, tile, source, part, again)

    def answer(member: AttentionSide, tile: int) -> None:
        (item,) = items(expert)
        assert (item.tile, item.n, item.ranks) == (tile, part.n, (member.me.rank,))
        serve(expert, item)
        (arrival,) = arrivals(member)
        member.combine_add(arrival, part.rows, torch.zeros(3, 4))

    send(ahead, 5, again=True)
    answer(ahead, 5)
    send(ahead, 6, again=False)
    answer(ahead, 6)
    send(behind, 4, again=True)
    answer(behind, 4)
    send(behind, 5, again=False)
    answer(behind, 5)
    for member in (behind, ahead):  # the next layer is served together again
        send(member, 0, again=False, layer=1)
    (item,) = items(expert)
    assert item.ranks == (0, 1)
    serve(expert, item)
    for member in (behind, ahead):
        member.combine_add(arrivals(member)[0], part.rows, torch.zeros(3, 4))

    send(ahead, 0, again=False, layer=2)
    wait(expert)
    assert expert.dispatch_recv() == []
    send(behind, 0, again=True, layer=2)  # it had been sent to the last life, and the other not
    together = items(expert, 2)
    assert [item.ranks for item in together] == [(0,), (1,)]


def test_warm_up_meets_every_pair_and_loses_no_dispatch(make_pairs: MakePairs) -> None:
    pairs = make_pairs(groups=2, experts=(2, 2))
    first, late = pairs.attention(0), pairs.attention(1)
    ranks = [pairs.expert(0), pairs.expert(1)]
    with ThreadPoolExecutor(2) as sides:
        waiting = [sides.submit(rank.warm_up, 20) for rank in ranks]
        assert first.warm_up(20) == []
        assert not any(side.done() for side in waiting)  # group 1 has not rung
        source, part = one_part()
        assert first.dispatch_send(0, 0, 1, 0, 0, source, part)
        late.warm_up(20)
        for side in waiting:
            assert side.result() == []
    serve(ranks[0], items(ranks[0])[0])
    arrivals(first)
    assert first.warm_up(0) == first.cold == []  # nothing left to do


def test_warm_up_names_who_is_missing(make_recovering: MakePairs) -> None:
    pairs = make_recovering(groups=2, experts=(2, 2))
    attention, expert = pairs.attention(0), pairs.expert(1)
    with ThreadPoolExecutor(1) as side:
        waiting = side.submit(expert.warm_up, 0.5)
        assert attention.warm_up(0.5) == attention.cold == [RankId("expert", 0)]
        assert waiting.result() == expert.cold == [RankId("attention", 1)]


def test_nothing_is_left_behind(make_windows: MakePairs, tmp_path: Path) -> None:
    pairs = make_windows()
    attention, expert = pairs.attention(), pairs.expert()
    assert len(list(tmp_path.glob("*.0"))) == 2
    assert "asapctl-window" in Path("/proc/self/maps").read_text()
    source, part = one_part()
    attention.dispatch_send(0, 0, 1, 0, 0, source, part)
    work = expert.open(items(expert)[0])
    pairs.close()
    assert list(tmp_path.glob("*.0")) == []
    assert torch.equal(work.hidden, source[part.rows])  # a view outlives the endpoint
    del work
    assert "asapctl-window" not in Path("/proc/self/maps").read_text()
    pairs.endpoints.clear()
    pairs.fds.clear()
