"""Where a rank's time goes, from the spans it recorded. Pure."""

from collections import defaultdict
from collections.abc import Sequence

from engine.control.messages import Span

IDLE = "idle"

# What a span's own time counts as: that of spans inside it is theirs.
_PARTS = {
    "core": "attention",
    "attend": "projections",
    "route": "gate",
    "dispatch": "dispatch",
    "combine": "combine",
    "shared": "dense",
    "dense": "dense",
    "finish": "head",
    "embed": "embed",
    "experts": "expert GEMM",
    "serve": "combine",  # an expert rank's: opening the dispatch, and answering
}


def breakdown(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
    """Shares of the time from `start` to `end` (the clock of the spans), which add up to 1.

    What no span covers is idle: waiting for others, and the loop's own steps between spans. A span
    that is unknown counts by its own name. Spans nest or do not overlap, but for "wait".
    """
    clipped = [
        (max(span.start, start), min(span.end, end), span.what)
        for span in spans
        if span.what != "wait" and span.end > start and span.start < end
    ]
    own: dict[str, float] = defaultdict(float)
    outer: list[tuple[float, str]] = []  # spans that are open: their end, and what they are
    for begin, stop, what in sorted(clipped, key=lambda span: (span[0], -span[1])):
        while outer and outer[-1][0] <= begin:
            outer.pop()
        name = _PARTS.get(what, what)
        own[name] += stop - begin
        if outer:
            own[outer[-1][1]] -= stop - begin
        outer.append((stop, name))
    shares = {name: seconds / (end - start) for name, seconds in own.items()}
    return {**shares, IDLE: max(0.0, 1.0 - sum(shares.values()))}


def mean_of(shares: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of several ranks: the mean of each part, the largest first, idle last."""
    total: dict[str, float] = defaultdict(float)
    for rank in shares:
        for name, share in rank.items():
            total[name] += share
    means = {name: share / len(shares) for name, share in total.items()}
    return dict(sorted(means.items(), key=lambda part: (part[0] == IDLE, -part[1])))
