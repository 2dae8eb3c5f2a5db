"""Recording spans, and their conversion to what Perfetto reads."""

import time
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.control.messages import RankSpans, Span, TraceReport
from engine.control.perfetto import to_perfetto
from engine.control.tracing import TraceCollector
from engine.topology.ranks import RankId
from engine.worker import recorder as module
from engine.worker.recorder import Recorder
from helpers.traces import check_trace


def test_a_dispatch_is_followed_to_its_combine() -> None:
    attention = RankSpans(
        RankId("attention", 1),
        4001,
        [
            Span("attend", 100.0, 100.5, batch=7, lane=1, layer=3, tokens=64),
            Span("dispatch", 100.5, 100.51, 7, 1, 3, 0, peer=2, tokens=40),
            Span("wait", 100.51, 100.9, 7, 1, 3),
            Span("combine", 100.9, 100.95, 7, 1, 3, 0, peer=2, tokens=40),
        ],
    )
    expert = RankSpans(
        RankId("expert", 2),
        4002,
        [Span("serve", 100.6, 100.8, 7, 1, 3, 0, peer=1, tokens=40)],
        dropped=3,
    )
    trace = to_perfetto(TraceReport(99.9, 101.9, [expert, attention]))
    phases = check_trace(trace)
    assert trace["otherData"] == {"seconds": pytest.approx(2.0), "dropped_spans": 3}
    assert [e["name"] for e in phases["X"]] == [
        "attend batch 7 layer 3",
        "dispatch batch 7 layer 3",
        "wait batch 7 layer 3",
        "combine batch 7 layer 3",
        "serve batch 7 layer 3",
    ]
    first = phases["X"][0]
    assert (first["ts"], first["dur"]) == pytest.approx((1e5, 5e5))
    assert first["args"] == {"batch": 7, "lane": 1, "layer": 3, "tokens": 64}
    assert phases["X"][4]["args"]["group"] == 1
    (start,), (middle,), (end,) = phases["s"], phases["t"], phases["f"]
    assert [e["ts"] for e in (start, middle, end)] == pytest.approx([6e5, 7e5, 1e6])
    assert start["pid"] == end["pid"] != middle["pid"]
    names = [e["args"]["name"] for e in phases["M"] if e["name"] == "process_name"]
    assert names == ["attention 1 (pid 4001)", "expert 2 (pid 4002)"]
    tracks = [e["args"]["name"] for e in phases["M"] if e["name"] == "thread_name"]
    assert tracks == ["lane 1", "work items"]


def test_what_is_sent_again_is_another_arrow() -> None:
    def at(what: str, start: float, peer: int) -> Span:
        return Span(what, start, start + 0.1, 7, 0, 3, 0, peer=peer)

    sent = [at("dispatch", 1.0, 0), at("dispatch", 3.0, 0), at("combine", 4.0, 0)]
    ranks = [
        RankSpans(RankId("attention", 0), 1, sent),
        RankSpans(RankId("expert", 0), 2, [at("serve", 2.0, 0), at("serve", 3.5, 0)]),
    ]
    phases = check_trace(to_perfetto(TraceReport(0.0, 5.0, ranks)))
    found = [(e["id"], e["ts"]) for e in phases["s"] + phases["t"] + phases["f"]]
    assert sorted(found) == [(1, 1e6), (1, 2e6), (2, 3e6), (2, 3.5e6), (2, 4e6)]


def test_a_work_item_whose_dispatch_was_not_recorded_joins_no_arrow() -> None:
    def at(what: str, start: float) -> Span:
        return Span(what, start, start + 0.1, 7, 0, 3, 0, peer=0)

    ranks = [
        RankSpans(RankId("attention", 0), 1, [at("dispatch", 1.0), at("combine", 4.0)]),
        RankSpans(RankId("expert", 0), 2, [at("serve", 2.0), at("serve", 3.0)]),
    ]
    phases = check_trace(to_perfetto(TraceReport(0.0, 5.0, ranks)))
    assert [e["ts"] for e in phases["s"] + phases["t"] + phases["f"]] == [1e6, 2e6]


def test_arrows_with_one_end_are_left_out() -> None:
    alone = [Span("dispatch", 1.0, 1.1, 7, 0, 3, 0, peer=0)]
    served_before = [Span("serve", 1.0, 1.1, 8, 0, 3, 0, peer=0)]
    ranks = [
        RankSpans(RankId("attention", 0), 1, alone),
        RankSpans(RankId("expert", 0), 2, served_before),
    ]
    phases = check_trace(to_perfetto(TraceReport(0.0, 5.0, ranks)))
    assert not phases["s"] + phases["t"] + phases["f"]
    assert check_trace(to_perfetto(TraceReport(0.0, 1.0, [])))["X"] == []


def test_time_is_never_negative_and_what_nobody_asked_for_is_left_out() -> None:
    spans = [Span("serve", start, start + 1.0, 1, 0, 0, 0, 0) for start in (8.0, 9.5, 13.0)]
    early = RankSpans(RankId("expert", 0), 2, spans)
    phases = check_trace(to_perfetto(TraceReport(10.0, 12.0, [early])))
    assert [(event["ts"], event["dur"]) for event in phases["X"]] == [(0, 1e6)]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),  # group
            st.integers(0, 2),  # expert rank
            st.integers(0, 3),  # layer
            st.floats(0.0, 0.01),  # between dispatch and serve
            st.floats(1e-7, 0.01),
            st.tuples(st.booleans(), st.booleans(), st.booleans()),  # what was recorded
        ),
        max_size=40,
    )
)
def test_any_trace_is_sound(
    steps: list[tuple[int, int, int, float, float, tuple[Any, ...]]],
) -> None:
    clock = 1000.0
    spans: dict[RankId, list[Span]] = defaultdict(list)
    for group, expert, layer, gap, took, recorded in steps:
        attention, serving = RankId("attention", group), RankId("expert", expert)
        for keep, id_, what, peer in zip(
            recorded,
            (attention, serving, attention),
            ("dispatch", "serve", "combine"),
            (expert, group, expert),
            strict=True,
        ):
            if keep:
                spans[id_].append(Span(what, clock, clock + took, 5, 0, layer, 0, peer, 8))
            clock += took + gap
    ranks = [RankSpans(id_, 1, mine) for id_, mine in spans.items()]
    check_trace(to_perfetto(TraceReport(1000.0, clock, ranks)))


def test_recording() -> None:
    recorder = Recorder()
    with recorder.span("attend", batch=1):
        pass
    assert recorder.take() == ([], 0)
    before = time.monotonic()
    recorder.start(1000.0)
    with recorder.span("combine", 1, 0, 5, 2, 3, 64), recorder.span("dispatch", batch=2):
        pass
    assert not recorder.over
    (inner, outer), dropped = recorder.take()
    assert (outer.what, outer.batch, outer.lane, outer.layer) == ("combine", 1, 0, 5)
    assert (outer.tile, outer.peer, outer.tokens, dropped) == (2, 3, 64, 0)
    assert before <= outer.start <= inner.start <= inner.end <= outer.end <= time.monotonic()
    assert not recorder.on
    assert recorder.take() == ([], 0)


def test_it_is_over_when_its_time_is_up() -> None:
    recorder = Recorder()
    assert not recorder.over
    recorder.start(0.0)
    assert recorder.over
    recorder.take()
    assert not recorder.over


def test_too_many_spans_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SPANS", 3)
    recorder = Recorder()
    recorder.start(1000.0)
    for batch in range(5):
        with recorder.span("attend", batch=batch):
            pass
    spans, dropped = recorder.take()
    assert ([span.batch for span in spans], dropped) == ([0, 1, 2], 2)
    with pytest.raises(ValueError, match="it"), recorder.span("attend"):
        raise ValueError("it")


def test_times_of_another_machine_are_put_on_the_clock_of_this_one() -> None:
    client, rank = b"client", RankId("expert", 0)
    spans = RankSpans(rank, 7, [Span("serve", 5.0, 6.0)], machine="there", sent_at=8.0)
    found = []
    for machine in ("there", "here"):
        traces = TraceCollector()
        traces.start(client, {rank}, 100.0, 1.0)
        traces.add(spans, 102.0, machine)
        ((_, report),) = traces.finished(102.0)
        found.append([(span.start, span.end) for span in report.ranks[0].spans])
    assert found == [[(5.0, 6.0)], [(99.0, 100.0)]]
