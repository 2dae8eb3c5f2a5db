"""Gathers what the ranks recorded for a trace. Pure: time is an argument."""

from dataclasses import dataclass, field

import msgspec

from engine.control.messages import RankSpans, TraceReport
from engine.topology.ranks import RankId

# How long after the end of a trace a rank may take to send it: it may be in a long step.
_GRACE_S = 10.0


@dataclass
class _Trace:
    client: bytes
    start: float
    end: float
    missing: set[RankId]
    spans: list[RankSpans] = field(default_factory=list)


class TraceCollector:
    """One trace at a time for each client; all of them get what the ranks send."""

    def __init__(self) -> None:
        self._open: list[_Trace] = []

    def __bool__(self) -> bool:
        return bool(self._open)

    def start(self, client: bytes, ranks: set[RankId], now: float, seconds: float) -> None:
        self._open.append(_Trace(client, now, now + seconds, set(ranks)))

    def add(self, spans: RankSpans, now: float, machine: str) -> None:
        """`machine`: whose clock `now` is on. Spans of another machine are put on it, as if they
        had taken no time to come.
        """
        if spans.machine != machine:
            spans = _shifted(spans, now - spans.sent_at)
        for trace in self._open:
            if spans.id in trace.missing:
                trace.missing.discard(spans.id)
                trace.spans.append(spans)

    def gone(self, rank: RankId) -> None:
        """The rank died, and what it recorded with it."""
        for trace in self._open:
            trace.missing.discard(rank)

    def finished(self, now: float) -> list[tuple[bytes, TraceReport]]:
        """The reports that are complete, or will not become so, and whom they are for."""
        done = [t for t in self._open if now >= t.end and (not t.missing or now > t.end + _GRACE_S)]
        self._open = [trace for trace in self._open if trace not in done]
        return [(t.client, TraceReport(t.start, t.end, t.spans)) for t in done]


def _shifted(spans: RankSpans, by: float) -> RankSpans:
    moved = [
        msgspec.structs.replace(span, start=span.start + by, end=span.end + by)
        for span in spans.spans
    ]
    return msgspec.structs.replace(spans, spans=moved)
