"""A trace in the form that Perfetto and Chrome read (Trace Event Format, JSON). Pure.

Each rank is a process; an attention rank has a track for each lane, an expert rank one. A flow
arrow goes from a dispatch to the work item that it made, and on to the combine of its rows.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, TypeAlias

import msgspec

from engine.control.messages import RankSpans, Span, TraceReport
from engine.topology.ranks import RankId

Event: TypeAlias = dict[str, Any]

_FLOW = "tokens"
_SERVE_TRACK = 0
_ORDER = {"dispatch": 0, "serve": 1, "combine": 2}


def to_perfetto(report: TraceReport) -> dict[str, Any]:
    """The JSON object. Timestamps are microseconds since `report.start`.

    When a span began before that, since the first one. A rank that records for somebody else too
    sends more than was asked for; spans wholly outside of the report's time are left out.
    """
    ranks = [_within(report, rank) for rank in sorted(report.ranks, key=lambda rank: rank.id)]
    base = min([report.start, *(span.start for rank in ranks for span in rank.spans)])
    events: list[Event] = []
    for pid, rank in enumerate(ranks, start=1):
        events += _names(pid, rank)
        events += [
            _slice(pid, rank.id, span, base)
            for span in sorted(rank.spans, key=lambda span: (span.start, -span.end))
        ]
    # After the slices: an arrow is tied to the slice that is open at its time.
    events += _arrows(ranks, base)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "seconds": report.end - report.start,
            "dropped_spans": sum(rank.dropped for rank in ranks),
        },
    }


def _within(report: TraceReport, rank: RankSpans) -> RankSpans:
    spans = [span for span in rank.spans if span.end >= report.start and span.start <= report.end]
    return msgspec.structs.replace(rank, spans=spans)


def _names(pid: int, rank: RankSpans) -> Iterator[Event]:
    name = f"{rank.id} (pid {rank.pid})"
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for track in sorted({_track(rank.id, span) for span in rank.spans}):
        name = f"lane {track}" if rank.id.role == "attention" else "work items"
        event = {"ph": "M", "pid": pid, "tid": track}
        yield {**event, "name": "thread_name", "args": {"name": name}}
        yield {**event, "name": "thread_sort_index", "args": {"sort_index": track}}


def _track(id_: RankId, span: Span) -> int:
    return max(span.lane, 0) if id_.role == "attention" else _SERVE_TRACK


def _slice(pid: int, id_: RankId, span: Span, base: float) -> Event:
    name = span.what
    if span.batch >= 0:
        name += f" batch {span.batch}"
    if span.layer >= 0:
        name += f" layer {span.layer}"
    start, end = _microseconds(span.start, base), _microseconds(span.end, base)
    other = "expert_rank" if id_.role == "attention" else "group"
    args = {
        "batch": span.batch,
        "lane": span.lane,
        "layer": span.layer,
        "tile": span.tile,
        other: span.peer,
        "tokens": span.tokens if span.tokens else -1,
    }
    return {
        "ph": "X",
        "pid": pid,
        "tid": _track(id_, span),
        "ts": start,
        "dur": round(end - start, 3),
        "name": name,
        "cat": span.what,
        "args": {key: value for key, value in args.items() if value >= 0},
    }


# group, batch, layer, tile, expert rank
_Key: TypeAlias = tuple[int, int, int, int, int]
_Step: TypeAlias = tuple[float, int, Event]


def _arrows(ranks: Sequence[RankSpans], base: float) -> Iterator[Event]:
    """From each dispatch whose work item or combine is known too."""
    steps: dict[_Key, list[_Step]] = defaultdict(list)
    for pid, rank in enumerate(ranks, start=1):
        for span in rank.spans:
            if span.what in _ORDER:
                event: Event = {"pid": pid, "tid": _track(rank.id, span)}
                event["ts"] = _microseconds(span.start, base)
                order = _ORDER[span.what]
                steps[_key(rank.id, span)].append((span.start, order, event))
    ids = count(1)
    for key in sorted(steps):
        for chain in _chains(sorted(steps[key], key=lambda step: step[:2])):
            id_ = next(ids)
            for place, event in enumerate(chain):
                arrow = {"ph": "t", "name": _FLOW, "cat": _FLOW, "id": id_, **event}
                if place == 0:
                    arrow["ph"] = "s"
                elif place == len(chain) - 1:
                    arrow.update(ph="f", bp="e")
                yield arrow


def _key(id_: RankId, span: Span) -> _Key:
    group, expert = id_.rank, span.peer
    if id_.role == "expert":
        group, expert = expert, group
    return group, span.batch, span.layer, span.tile, expert


def _chains(steps: Iterable[_Step]) -> Iterator[list[Event]]:
    """Dispatch, work item, combine. What was sent again, to a new life, is another chain."""
    chain: list[Event] = []
    last = -1
    for _, order, event in steps:
        if order == 0 or order <= last:
            if len(chain) > 1:
                yield chain
            chain = []
        if chain or order == 0:
            chain.append(event)
            last = order
    if len(chain) > 1:
        yield chain


def _microseconds(time: float, base: float) -> float:
    """To the nanosecond, so that what nests in seconds nests in the file."""
    return round((time - base) * 1e6, 3)
