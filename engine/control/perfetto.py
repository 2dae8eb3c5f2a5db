"""A trace in the form that Perfetto and Chrome read (Trace Event Format, JSON). Pure.

Each rank is a process; an attention rank has a track for each lane, an expert rank one. A flow
arrow goes from a dispatch to the work item that it made, and on to the combine of its rows.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count
from typing import Any, TypeAlias

import msgspec

from engine.control.messages import RankSpans, Span, TraceReport
from engine.topology.ranks import RankId

Event: TypeAlias = dict[str, Any]
_Process: TypeAlias = tuple[int, str, RankSpans]  # its pid in the file, what its name begins with

_FLOW = "tokens"
_SERVE_TRACK = 0
_ORDER = {"dispatch": 0, "serve": 1, "combine": 2}


def to_perfetto(*reports: TraceReport) -> dict[str, Any]:
    """The JSON object, of one instance or of several that were recorded together.

    Timestamps are microseconds since the first `start`; when a span began before that, since the
    first one. A rank that records for somebody else too sends more than was asked for; spans
    wholly outside of the report's time are left out.
    """
    instances = [
        [_within(report, rank) for rank in sorted(report.ranks, key=lambda rank: rank.id)]
        for report in reports
    ]
    every = [rank for ranks in instances for rank in ranks]
    start = min(report.start for report in reports)
    base = min([start, *(span.start for rank in every for span in rank.spans)])
    processes: list[list[_Process]] = []
    pids, arrows = count(1), count(1)
    for number, ranks in enumerate(instances):
        prefix = f"instance {number} " if len(reports) > 1 else ""
        processes.append([(next(pids), prefix, rank) for rank in ranks])
    events: list[Event] = []
    for pid, prefix, rank in chain.from_iterable(processes):
        events += _names(pid, prefix, rank)
        events += [
            _slice(pid, rank.id, span, base)
            for span in sorted(rank.spans, key=lambda span: (span.start, -span.end))
        ]
    # After the slices: an arrow is tied to the slice that is open at its time.
    for instance in processes:
        events += _arrows(instance, base, arrows)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "seconds": max(report.end for report in reports) - start,
            "dropped_spans": sum(rank.dropped for rank in every),
        },
    }


def _within(report: TraceReport, rank: RankSpans) -> RankSpans:
    spans = [span for span in rank.spans if span.end >= report.start and span.start <= report.end]
    return msgspec.structs.replace(rank, spans=spans)


def _names(pid: int, prefix: str, rank: RankSpans) -> Iterator[Event]:
    name = f"{prefix}{rank.id} (pid {rank.pid})"
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


def _arrows(instance: Sequence[_Process], base: float, ids: Iterator[int]) -> Iterator[Event]:
    """From each dispatch whose work item or combine is known too."""
    steps: dict[_Key, list[_Step]] = defaultdict(list)
    for pid, _, rank in instance:
        for span in rank.spans:
            if span.what in _ORDER:
                event: Event = {"pid": pid, "tid": _track(rank.id, span)}
                event["ts"] = _microseconds(span.start, base)
                order = _ORDER[span.what]
                steps[_key(rank.id, span)].append((span.start, order, event))
    for key in sorted(steps):
        for parts in _chains(sorted(steps[key], key=lambda step: step[:2])):
            id_ = next(ids)
            for place, event in enumerate(parts):
                arrow = {"ph": "t", "name": _FLOW, "cat": _FLOW, "id": id_, **event}
                if place == 0:
                    arrow["ph"] = "s"
                elif place == len(parts) - 1:
                    arrow.update(ph="f", bp="e")
                yield arrow


def _key(id_: RankId, span: Span) -> _Key:
    group, expert = id_.rank, span.peer
    if id_.role == "expert":
        group, expert = expert, group
    return group, span.batch, span.layer, span.tile, expert


def _chains(steps: Iterable[_Step]) -> Iterator[list[Event]]:
    """Dispatch, work item, combine. What was sent again, to a new life, is another chain."""
    parts: list[Event] = []
    last = -1
    for _, order, event in steps:
        if order == 0 or order <= last:
            if len(parts) > 1:
                yield parts
            parts = []
        if parts or order == 0:
            parts.append(event)
            last = order
    if len(parts) > 1:
        yield parts


def _microseconds(time: float, base: float) -> float:
    """To the nanosecond, so that what nests in seconds nests in the file."""
    return round((time - base) * 1e6, 3)
