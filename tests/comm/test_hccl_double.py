"""The stand-in for HCCL keeps HCCL's rules: it refuses, and it waits, where gloo does not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeAlias

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store

from engine.device.cpu import gloo
from helpers.hccl_double import HcclDouble, HcclRefusedError, HcclWork, NpuDouble, check_ports

SOON = timedelta(seconds=20)  # a test that waits this long has failed
DEADLINE = timedelta(seconds=0.5)  # where waiting for it is the point

Make: TypeAlias = Callable[..., list[HcclDouble]]


@pytest.fixture
def ends() -> Iterator[Make]:
    """Makes all ranks of a communicator, in this process."""
    made: list[HcclDouble] = []

    def make(size: int = 2, timeout: timedelta = SOON) -> list[HcclDouble]:
        store = HashStore()
        new = [HcclDouble(store, rank, size, timeout, {}) for rank in range(size)]
        made.extend(new)
        return new

    yield make
    for end in made:
        end.abort()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returns; they run at the same time, as ranks do."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(SOON.total_seconds()) for future in [pool.submit(c) for c in calls]]


def failures(works: Sequence[HcclWork]) -> list[str]:
    """How each has failed; one that has not within the time is an error of the test."""
    found = []
    for work in works:
        with pytest.raises(RuntimeError) as error:
            work.wait(SOON)
        found.append(str(error.value))
    return found


def pair(ends: Make, first: Any, second: Any, **options: Any) -> list[HcclWork]:
    """first and second: (operation, tensor) of rank 0 and of rank 1, with each other."""
    both = ends(**options)
    return together(
        *(
            lambda rank=rank, operation=operation, tensor=tensor: getattr(both[rank], operation)(
                [tensor], 1 - rank, 0
            )
            for rank, (operation, tensor) in enumerate((first, second))
        )
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.bfloat16, torch.uint32])
def test_a_message_arrives(ends: Make, dtype: torch.dtype) -> None:
    sent, received = torch.arange(6).to(dtype).view(2, 3), torch.zeros(2, 3, dtype=dtype)
    for work in pair(ends, ("send", sent), ("recv", received)):
        work.wait(SOON)
        assert work.is_completed()
    assert torch.equal(received, sent)


def test_messages_of_a_direction_keep_their_order(ends: Make) -> None:
    sender, receiver = ends()
    sizes = [1, 300_000, 7]
    received = [torch.zeros(size) for size in sizes]

    def send() -> list[HcclWork]:
        return [sender.send([torch.full((size,), float(size))], 1, 0) for size in sizes]

    def receive() -> list[HcclWork]:
        return [receiver.recv([tensor], 0, 0) for tensor in received]

    for works in together(send, receive):
        for work in works:
            work.wait(SOON)
    assert [
        (tensor == size).all().item() for tensor, size in zip(received, sizes, strict=True)
    ] == [True] * 3


def connected(ends: Make, **options: Any) -> list[HcclDouble]:
    """Past the first operation, which makes the communicator."""
    both = ends(**options)
    for work in together(
        lambda: both[0].send([torch.zeros(1)], 1, 0), lambda: both[1].recv([torch.zeros(1)], 0, 0)
    ):
        work.wait(SOON)
    return both


def test_a_send_blocks_until_its_receive_is_posted(ends: Make) -> None:
    sender, receiver = connected(ends)
    sent = sender.send([torch.ones(4)], 1, 0)
    with pytest.raises(RuntimeError, match="still waiting"):
        sent.wait(timedelta(seconds=0.2))
    assert not sent.is_completed()
    receiver.recv([torch.zeros(4)], 0, 0).wait(SOON)
    sent.wait(SOON)


def test_the_first_operation_blocks_its_caller_until_the_others_come(ends: Make) -> None:
    sender, receiver = ends()
    returned = threading.Event()

    def first() -> HcclWork:
        work = sender.send([torch.ones(1)], 1, 0)
        returned.set()
        return work

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(first)
        assert not returned.wait(0.2)
        receiver.recv([torch.zeros(1)], 0, 0).wait(SOON)
        call.result(SOON.total_seconds()).wait(SOON)


def test_a_communicator_does_one_operation_after_another(ends: Make) -> None:
    """Rank 0's second send has its receive, but stands behind one that has none."""
    first, second, third = ends(size=3)
    ready = [torch.zeros(1) for _ in range(3)]
    for work in together(
        lambda: first._allgather_base(torch.zeros(3), ready[0]),
        lambda: second._allgather_base(torch.zeros(3), ready[1]),
        lambda: third._allgather_base(torch.zeros(3), ready[2]),
    ):
        work.wait(SOON)
    blocked, behind = first.send([torch.ones(1)], 1, 0), first.send([torch.ones(1)], 2, 0)
    received = third.recv([torch.zeros(1)], 0, 0)
    with pytest.raises(RuntimeError, match="still waiting"):
        received.wait(timedelta(seconds=0.2))
    second.recv([torch.zeros(1)], 0, 0).wait(SOON)
    for work in (blocked, behind, received):
        work.wait(SOON)


# One communicator for both directions.


def on_gloo(store: Store) -> list[Any]:
    return together(*(lambda rank=rank: gloo(store, rank, 2, SOON) for rank in range(2)))


def on_double(store: Store) -> list[Any]:
    return [HcclDouble(store, rank, 2, SOON, {}) for rank in range(2)]


def exchange(forth: Sequence[Any], back: Sequence[Any]) -> None:
    """Each rank queues its send, and behind it the receive that the other one's send waits for."""

    def rank(me: int) -> None:
        out, into = (forth, back) if me == 0 else (back, forth)
        received = torch.zeros(8)
        works = [
            out[me].send([torch.full((8,), float(me))], 1 - me, 0),
            into[me].recv([received], 1 - me, 0),
        ]
        for work in works:
            work.wait(SOON)
        assert (received == 1 - me).all()

    together(lambda: rank(0), lambda: rank(1))


def test_shared_directions_deadlock() -> None:
    shared = on_double(HashStore())
    with pytest.raises(HcclRefusedError, match=r"deadlock: ranks [01] and [01] both send"):
        exchange(shared, shared)


def test_gloo_hides_shared_directions() -> None:
    shared = on_gloo(HashStore())
    exchange(shared, shared)


def test_a_communicator_for_each_direction_does_not_deadlock() -> None:
    store = HashStore()
    # Whoever connects first waits for the other, so both begin with the same.
    forth, back = on_double(PrefixStore("forth", store)), on_double(PrefixStore("back", store))
    for way in (forth, back):
        together(way[0]._connect, way[1]._connect)
    exchange(forth, back)


def test_ranks_that_connect_in_another_order_wait_for_each_other() -> None:
    """As two pairs of directions do that are opened forth first here and back first there."""
    store = HashStore()
    forth = [HcclDouble(PrefixStore("forth", store), rank, 2, DEADLINE, {}) for rank in range(2)]
    back = [HcclDouble(PrefixStore("back", store), rank, 2, DEADLINE, {}) for rank in range(2)]

    def connect(first: HcclDouble, second: HcclDouble) -> None:
        first._connect()
        second._connect()

    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
        together(lambda: connect(forth[0], back[0]), lambda: connect(back[1], forth[1]))


# What is refused.


def test_a_receive_from_anyone(ends: Make) -> None:
    with pytest.raises(HcclRefusedError, match="recvAnysource"):
        ends()[1].recv_anysource([torch.zeros(1)], 0)


@pytest.mark.parametrize("operation", ["send", "recv"])
@pytest.mark.parametrize(
    ("tensors", "peer", "tag", "why"),
    [
        ([torch.zeros(1)], 1, 7, "tag 7"),
        ([torch.zeros(1), torch.zeros(1)], 1, 0, "2 tensors"),
        ([], 1, 0, "0 tensors"),
        ([torch.zeros(1, dtype=torch.bool)], 1, 0, "data type"),
        ([torch.zeros(1, dtype=torch.complex64)], 1, 0, "data type"),
        ([torch.zeros(1, dtype=torch.float8_e4m3fn)], 1, 0, "data type"),
        ([torch.zeros(4, 4)[:, :2]], 1, 0, "contiguous"),
        ([torch.zeros(0, 4)], 1, 0, "no elements"),
        ([torch.zeros(1)], 2, 0, "rank 0 of 2 with 2"),
        ([torch.zeros(1)], 0, 0, "rank 0 of 2 with 0"),
        ([torch.zeros(1)], -1, 0, "rank 0 of 2 with -1"),
    ],
)
def test_an_operation_that_is_not_allowed(
    ends: Make, operation: str, tensors: list[torch.Tensor], peer: int, tag: int, why: str
) -> None:
    with pytest.raises(HcclRefusedError, match=why):
        getattr(ends()[0], operation)(tensors, peer, tag)


@pytest.mark.parametrize(
    ("received", "sides"),
    [
        (torch.zeros(5), ("send of 4 torch.float32", "recv of 5 torch.float32")),
        (torch.zeros(4, dtype=torch.int32), ("send of 4 torch.float32", "recv of 4 torch.int32")),
    ],
)
def test_a_receive_of_another_size_or_type(
    ends: Make, received: torch.Tensor, sides: tuple[str, str]
) -> None:
    for said in failures(pair(ends, ("send", torch.ones(4)), ("recv", received))):
        assert said.startswith("unmatched")
        assert all(one in said for one in sides)


def test_two_receives(ends: Make) -> None:
    works = pair(ends, ("recv", torch.ones(4)), ("recv", torch.ones(4)))
    assert all("deadlock" in said and "both recv" in said for said in failures(works))


def test_messages_in_another_order_than_they_are_received(ends: Make) -> None:
    sender, receiver = connected(ends)
    sent = [sender.send([torch.ones(size)], 1, 0) for size in (2, 3)]
    received = [receiver.recv([torch.ones(size)], 0, 0) for size in (3, 2)]
    assert all("unmatched" in said for said in failures([*sent, *received]))


def test_a_receive_that_never_comes_fails_at_the_deadline(ends: Make) -> None:
    sender, _ = connected(ends, timeout=DEADLINE)
    assert "deadline: rank 1 does not come" in failures([sender.send([torch.ones(1)], 1, 0)])[0]
    with pytest.raises(RuntimeError, match="deadline"):  # nor does anything after it
        sender.send([torch.ones(1)], 1, 0)


def test_aborting_fails_what_is_queued(ends: Make) -> None:
    sender, _ = connected(ends)
    sent = [sender.send([torch.ones(1)], 1, 0) for _ in range(2)]
    sender.abort()
    assert failures(sent) == ["the communicator was aborted"] * 2


def test_shutting_down_does_what_is_queued(ends: Make) -> None:
    sender, receiver = connected(ends)
    sent = [sender.send([torch.ones(1)], 1, 0) for _ in range(3)]
    received = [receiver.recv([torch.ones(1)], 0, 0) for _ in range(3)]
    sender.shutdown()
    assert all(work.is_completed() for work in sent)
    received[-1].wait(SOON)


# Collectives.


def test_collectives(ends: Make) -> None:
    def rank(end: HcclDouble) -> list[torch.Tensor]:
        own = torch.arange(6, dtype=torch.bfloat16).view(3, 2) + 10 * end.rank()
        gathered = torch.zeros(9, 2, dtype=own.dtype)
        parts = [torch.zeros_like(own) for _ in range(3)]
        swapped, total = torch.zeros_like(own), own.clone()
        scattered = torch.zeros(1, 2, dtype=own.dtype)
        end._allgather_base(gathered, own).wait(SOON)
        end.allgather([parts], [own]).wait(SOON)
        end.alltoall_base(swapped, own, [], []).wait(SOON)
        end.allreduce([total]).wait(SOON)
        end._reduce_scatter_base(scattered, own).wait(SOON)
        end.barrier().wait(SOON)
        return [gathered, torch.cat(parts), swapped, total, scattered]

    inputs = [torch.arange(6, dtype=torch.bfloat16).view(3, 2) + 10 * rank for rank in range(3)]
    whole, total = torch.cat(inputs), inputs[0] + inputs[1] + inputs[2]
    results = together(*(lambda end=end: rank(end) for end in ends(size=3)))
    for me, found in enumerate(results):
        swapped = torch.stack([one[me] for one in inputs])
        expected = [whole, whole, swapped, total, total[me : me + 1]]
        assert all(torch.equal(*both) for both in zip(found, expected, strict=True))


def test_a_sum_of_a_type_that_cannot_be_summed(ends: Make) -> None:
    one, double = ends()[0], torch.zeros(2, dtype=torch.float64)
    with pytest.raises(HcclRefusedError, match=r"data type.*float64"):
        one.allreduce([double])
    with pytest.raises(HcclRefusedError, match=r"data type.*float64"):
        one._reduce_scatter_base(double[:1], double)


def test_collectives_of_other_sizes(ends: Make) -> None:
    one, two = ends()
    works = together(lambda: one.allreduce([torch.ones(2)]), lambda: two.allreduce([torch.ones(3)]))
    assert all("unmatched" in said for said in failures(works))


# Ports.


@pytest.mark.parametrize(
    ("environ", "used", "why"),
    [
        ({"HCCL_IF_BASE_PORT": "50000"}, {50031}, "port 50031 is in use"),
        ({"HCCL_IF_BASE_PORT": "1023"}, set(), "not of 1024"),
        ({"HCCL_IF_BASE_PORT": "65521"}, set(), "not of 1024"),
        ({"HCCL_IF_BASE_PORT": "65520"}, set(), "pass 65535"),
        ({"HCCL_IF_BASE_PORT": "x"}, set(), "not of 1024"),
        ({"HCCL_HOST_SOCKET_PORT_RANGE": "50000-50001"}, {50000, 50001}, "no port"),
        ({"HCCL_HOST_SOCKET_PORT_RANGE": "50001-50000"}, set(), "PORT_RANGE=50001-50000"),
    ],
)
def test_ports_that_cannot_be_had(environ: dict[str, str], used: set[int], why: str) -> None:
    with pytest.raises(HcclRefusedError, match=why):
        check_ports(environ, frozenset(used))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"HCCL_IF_BASE_PORT": "50000"},
        {"HCCL_HOST_SOCKET_PORT_RANGE": "49990-49999,50100", "HCCL_IF_BASE_PORT": "50050"},
        {"HCCL_HOST_SOCKET_PORT_RANGE": "auto"},
    ],
)
def test_ports_that_can(environ: dict[str, str]) -> None:
    check_ports(environ, frozenset({49999, 50032, 50050}))


def test_the_ports_of_the_environment_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_IF_BASE_PORT", "1")
    group = NpuDouble().process_group(HashStore(), 0, 2, DEADLINE)
    with pytest.raises(HcclRefusedError, match="HCCL_IF_BASE_PORT=1"):
        group.send([torch.zeros(1)], 1, 0)
