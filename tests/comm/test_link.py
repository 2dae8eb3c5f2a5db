"""A link on a device with streams: in which order it waits, launches and reports.

The device and the communicator are stand-ins that write down what they are asked to do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.distributed_c10d import Store

from engine.comm.doorbell import Bell, Kind
from engine.comm.link import Link
from engine.device.base import Device
from engine.device.base import Kind as DeviceKind
from engine.topology.ranks import RankId

DEADLINE_S = 20.0
BELL = Bell(Kind.DISPATCH, RankId("attention", 0), 0, lane=1, n=3)


class Streams(Device):
    """Events are numbered; `log` has every call, with the stream that was current."""

    kind: ClassVar[DeviceKind] = "cuda"
    backend: ClassVar[str] = "nccl"

    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self.log: list[tuple[Any, ...]] = []
        self._events = 0
        self._current = threading.local()

    @property
    def current(self) -> str:
        return getattr(self._current, "stream", "compute")

    def new_stream(self) -> str:
        return "own"

    def on_stream(self, stream: Any | None) -> AbstractContextManager[Any]:
        @contextmanager
        def switched() -> Iterator[None]:
            before, self._current.stream = self.current, stream or self.current
            yield
            self._current.stream = before

        return switched()

    def record(self) -> str:
        self._events += 1
        self.log.append(("record", self._events, self.current))
        return f"event {self._events}"

    def wait_event(self, event: Any | None) -> None:
        if event is not None:
            self.log.append(("wait", event, self.current))

    def synchronize(self, event: Any | None) -> None:
        self.log.append(("synchronize", event))

    def name(self) -> str:
        return "streams"

    def memory(self) -> tuple[int, int]:
        return 0, 0

    def process_group(self, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        raise NotImplementedError

    def group(self) -> Any:
        def queue(operation: str) -> Any:
            def call(tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
                self.log.append((operation, len(tensors[0]), peer, tag, self.current))
                return SimpleNamespace(wait=lambda: None)

            return call

        return SimpleNamespace(send=queue("send"), recv=queue("recv"))


def passed(sends: bool, overlap: bool, ahead: bool) -> tuple[list[tuple[Any, ...]], Any]:
    """What happens to one message after the link is connected; the event it is reported with."""
    device = Streams()
    reports: list[tuple[Any, ...]] = []
    connected, done = threading.Event(), threading.Event()

    def report(*what: Any) -> None:
        reports.append(what)
        device.log.append(("report",))
        (done if connected.is_set() else connected).set()

    link = Link("a to b", device.group, sends, device, overlap, ahead)
    link.start(report)
    assert connected.wait(DEADLINE_S)
    assert link.connected
    before = len(device.log)
    link.put(torch.zeros(7, dtype=torch.int8), BELL)
    assert done.wait(DEADLINE_S)
    link.close()
    bell, event, error = reports[1]
    assert (bell, error) == (BELL, None)
    return device.log[before:], event


def test_a_message_waits_for_what_was_launched_before_and_for_nothing_after() -> None:
    log, event = passed(sends=False, overlap=True, ahead=False)
    launched, *rest = log
    assert launched[0] == "record"
    assert launched[2] == "compute"
    assert rest == [
        ("wait", f"event {launched[1]}", "own"),
        ("recv", 7, 0, 0, "own"),
        ("record", launched[1] + 1, "own"),
        ("synchronize", event),
        ("report",),
    ]
    assert event == f"event {launched[1] + 1}"


def test_a_message_that_is_reported_ahead_makes_the_host_wait_for_nothing() -> None:
    log, event = passed(sends=False, overlap=True, ahead=True)
    assert [entry[0] for entry in log] == ["record", "wait", "recv", "record", "report"]
    assert event is not None


@pytest.mark.parametrize("overlap", [True, False])
def test_without_overlap_messages_go_on_the_stream_of_the_computation(overlap: bool) -> None:
    log, _ = passed(sends=True, overlap=overlap, ahead=False)
    (sent,) = [entry for entry in log if entry[0] == "send"]
    assert sent == ("send", 7, 1, 0, "own" if overlap else "compute")


def test_the_first_message_passes_before_the_link_counts_as_connected() -> None:
    device = Streams()
    connected = threading.Event()
    link = Link("a to b", device.group, True, device, True)
    link.start(lambda *_: connected.set())
    assert connected.wait(DEADLINE_S)
    assert ("send", 1, 1, 0, "own") in device.log
    link.close()


def test_a_communicator_that_cannot_be_built_is_reported() -> None:
    def fail() -> Any:
        raise RuntimeError("nobody came")

    reports: list[tuple[Any, ...]] = []
    reported = threading.Event()
    device = Streams()
    link = Link("a to b", fail, True, device, True)
    link.start(lambda *what: (reports.append(what), reported.set()))
    assert reported.wait(DEADLINE_S)
    assert reports == [(None, None, "no communicator for a to b: nobody came")]
    assert not link.connected


def test_a_link_that_is_replaced_reports_no_failure() -> None:
    """Its peer died while they were connecting."""
    failed = threading.Event()

    def fail() -> Any:
        failed.set()
        raise RuntimeError("connection reset")

    reports: list[tuple[Any, ...]] = []
    device = Streams()
    link = Link("a to b", fail, True, device, True, patience_s=DEADLINE_S)
    link.start(lambda *what: reports.append(what))
    assert failed.wait(DEADLINE_S)
    link.close()
    link.join(DEADLINE_S)
    assert reports == []


def test_links_connect_one_after_another_where_that_is_asked_for() -> None:
    device = Streams()
    order: list[str] = []
    gate, done = threading.Event(), threading.Event()

    def first() -> Any:
        assert gate.wait(DEADLINE_S)
        order.append("first")
        return device.group()

    def second() -> Any:
        order.append("second")
        return device.group()

    links = [Link("1", first, True, device, True), Link("2", second, True, device, True)]
    links[1].after = links[0]
    links[1].start(lambda *_: done.set())
    links[0].start(lambda *_: None)
    gate.set()
    assert done.wait(DEADLINE_S)
    assert order == ["first", "second"]
    for link in links:
        link.close()
